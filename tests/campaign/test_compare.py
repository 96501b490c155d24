"""``narrowfuzz compare``: what differs between two installations, by the same cases."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torchao
from narrowfuzz.campaign import compare
from narrowfuzz.campaign.accept import Accepting, check_accepting, write_accepted
from narrowfuzz.campaign.compare import CompareOptions, Side, compare_command, side_of
from narrowfuzz.campaign.comparison import compared, side_run
from narrowfuzz.campaign.comparison_side import CaseSeen, CauseSeen, SideRecorder, read_seen
from narrowfuzz.campaign.comparison_words import bits_said, verdict
from narrowfuzz.campaign.config import Place
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.fold import Judgement
from narrowfuzz.report.accepted import IDLE, accepted, suppressions
from narrowfuzz.report.store import Store
from narrowfuzz.trace.hashes import hashes_of
from narrowfuzz.trace.trace import Seen, Site, SiteTrace, Trace
from narrowfuzz.trace.verdict import Verdict

#: The place of the first process of the first worker.
FIRST = Place(0, 0, 0, 0.0)
RESULTS = {"eager": {"results": {"output": "1", "grad_input": "2"}, "scales": {"a": "3"}}}


def seen(
    case: str,
    *,
    shows: Sequence[str] = (),
    known: Sequence[str] = (),
    results: Mapping[str, Any] = RESULTS,
    rules: Sequence[str] = ("O3", "O5"),
    said: str = "wrong",
) -> CaseSeen:
    """What a case gave: fingerprints, entries, hashes."""
    causes = {name: CauseSeen(f"{name} is {said}", "O3", "eager") for name in shows}
    judged = {"eager": list(rules)} if rules else {}
    return CaseSeen(
        case, "r", "linear", judged, list(judged), list(known), causes, dict(results)
    )  # fmt: skip


def left(
    folder: Path, cases: Sequence[CaseSeen], rows: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """A run's folder: these cases, and these findings by fingerprint."""
    Store(folder)
    (folder / "beside").mkdir()
    lines = b"".join(msgspec.json.encode(one) + b"\n" for one in cases)
    (folder / "beside" / "0.0.jsonl").write_bytes(lines)
    every = [
        {
            "fingerprint": name, "status": "new", "severity": "low", "sentence": f"{name} is wrong",
            "recipe": "r", "arm": "eager", "case": f"findings/{name}/case.json",
            "script": f"findings/{name}/repro.py", "why_suspected": "", "accepted": "", **row,
        }
        for name, row in (rows or {}).items()
    ]  # fmt: skip
    (folder / "findings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in every))
    summary = {"never_judged": ["r inductor linear"], "seconds": 1.0, "notes": []}
    (folder / "summary.json").write_text(json.dumps(summary))
    environment = {"versions": {"torch": "2", "torchao": "1"}, "checkouts": {}}
    (folder / "env.json").write_text(json.dumps(environment))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(of A, of B, rows of B, codes): the comparison of two runs that left this."""

    def done(
        a: Sequence[CaseSeen],
        b: Sequence[CaseSeen],
        rows: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        of_a: Mapping[str, Mapping[str, Any]] | None = None,
        codes: tuple[int, int] = (0, 1),
        accepting: Accepting = Accepting(),  # noqa: B008 - frozen
    ) -> tuple[int, dict[str, Any]]:
        out = tmp_path / f"out{len([*tmp_path.iterdir()])}"

        def both(console: Any, sides: Sequence[Side], options: CompareOptions) -> list[int]:
            left(out / "A", a, of_a)
            left(out / "B", b, rows)
            for letter in "AB":
                (out / f"{letter}.log").write_text("narrowfuzz: no such recipe\n")
            return list(codes)

        monkeypatch.setattr(compare, "_run_both", both)
        options = CompareOptions(out, cases=5, accepting=accepting)
        code, document = compare_command(str(tmp_path), str(tmp_path), options)
        if codes == (0, 1):
            page = (out / "report.html").read_text()
            assert document["verdict"] in page and document["verdict"] in (
                (out / "summary.md").read_text().replace("\\", "")
            )
            kept = json.loads((out / "compare.json").read_text())
            assert kept == json.loads(json.dumps(document))
            return code, kept
        return code, document

    return done


def test_equal_findings_are_no_difference(run: Any) -> None:
    a = [seen("1", shows=["x", "y"]), seen("2", known=["entry"])]
    code, told = run(a, a)
    assert (code, told["differences"]) == (0, [])
    assert [one["fingerprint"] for one in told["both"]] == ["x", "y"]
    assert told["known"] == [{"id": "entry", "cases": [1, 1], "by_ledger": False, "one_side": ""}]


def test_what_one_side_shows_alone_comes_first_by_weight(run: Any) -> None:
    """What counts before what does not, then the gravest."""
    b = [seen("1", shows=["a", "b", "c", "d"])]
    rows = {
        "a": {"status": "suspected", "severity": "high", "why_suspected": "none shows it"},
        "b": {"severity": "high", "accepted": "meant"}, "c": {}, "d": {"severity": "medium"},
    }  # fmt: skip
    code, told = run([seen("1")], b, rows)
    assert code == 1 and [d["fingerprint"] for d in told["differences"]] == ["d", "c", "a", "b"]
    assert [d["counts"] for d in told["differences"]] == [True, True, False, False]
    assert {d["side"] for d in told["differences"]} == {"B"}


def test_what_is_gone_with_b_is_a_difference(run: Any) -> None:
    code, told = run([seen("1", shows=["x"])], [seen("1")], of_a={"x": {}})
    assert (code, [d["side"] for d in told["differences"]]) == (1, ["A"])


@pytest.mark.parametrize("row", [{"status": "suspected"}, {"accepted": "meant"}])
def test_what_no_script_shows_or_is_accepted_does_not_count(
    run: Any, row: Mapping[str, Any]
) -> None:
    code, told = run([seen("1")], [seen("1", shows=["x"])], {"x": row})
    assert code == 0 and len(told["differences"]) == 1
    assert told["verdict"] == "No difference that counts: 1 difference is listed that does not"


def test_what_its_process_did_not_live_to_look_into_is_suspected(run: Any) -> None:
    code, told = run([seen("1")], [seen("1", shows=["x"])])
    assert (code, told["differences"][0]["status"]) == (0, "suspected")


def test_a_known_issue_on_one_side_alone_is_a_difference(run: Any) -> None:
    code, told = run([seen("1", known=["entry"])], [seen("1", results={})])
    assert (code, told["known"][0]["one_side"]) == (1, "A")


def test_where_ledgers_differ_and_bits_do_not_libraries_do_not(run: Any) -> None:
    """In a changed library an entry's script may not show what still shows."""
    b = [seen("1", shows=["x"])]
    code, told = run([seen("1", known=["entry"])], b)
    assert (code, told["differences"], told["known"][0]["by_ledger"]) == (0, [], True)
    assert told["both"][0]["fingerprint"] == "x"
    other = {"eager": {"results": {"output": "9", "grad_input": "2"}, "scales": {"a": "3"}}}
    code, told = run([seen("1", known=["entry"], results=other)], b, {"x": {}})
    assert (code, len(told["differences"]), told["known"][0]["one_side"]) == (1, 1, "A")


def test_a_sentence_that_changed_on_the_same_case_is_told_twice(run: Any) -> None:
    a, b = seen("1", shows=["x"]), seen("1", shows=["x"], said="worse")
    _, told = run([seen("0", shows=["x"]), a], [b])
    assert told["both"][0]["sentences"] == ["x is wrong", "x is worse"]
    assert told["both"][0]["cases"] == [2, 1]


def test_how_much_was_compared_is_said(run: Any) -> None:
    code, told = run([seen("1"), seen("2")], [seen("1", rules=["O5", "O9"]), seen("3")])
    assert (code, told["cases"]) == (0, {"both": 1, "only A": 1, "only B": 1})
    assert told["rules"] == {"O5": 1} and told["combinations"] == ["r eager linear"]
    assert told["never_judged"] == ["r inductor linear"]


def test_a_case_that_is_drawn_twice_is_compared_turn_by_turn(run: Any) -> None:
    twice = [seen("1", rules=["O3"]), seen("1", rules=["O5"])]
    _, told = run(twice, twice)
    assert told["cases"]["both"] == 2 and told["rules"] == {"O3": 1, "O5": 1}


def test_bits_are_counted_by_kind(run: Any) -> None:
    other = {"eager": {"results": {"output": "1", "grad_input": "9"}, "scales": {"a": "3"}}}
    code, told = run([seen("1"), seen("2")], [seen("1"), seen("2", results=other)])
    bits = told["bits"]
    assert code == 0, "other bits are no broken rule"
    assert told["verdict"] == "No rule is broken on one side alone, though bits differ"
    assert (bits["compared"]["results"], bits["compared"]["scales"], bits["cases"]) == (4, 2, 1)
    assert (bits["differ"]["results"], bits["differ"]["scales"]) == (1, 0)
    assert bits["first"].startswith("grad_input on eager") and "case 2" in bits["first"]


def test_a_change_that_never_mattered_is_said(tmp_path: Path) -> None:
    for letter in "AB":
        left(tmp_path / letter, [seen("1")])
    found = compared(side_run("a", tmp_path / "A"), side_run("b", tmp_path / "B"))
    assert not found.differ and "none differs" in bits_said(found.bits)
    assert "No difference" in verdict(found)


def test_an_entry_that_matched_on_one_side_is_in_use(tmp_path: Path) -> None:
    """That the other side does not show what is accepted is why it was a difference."""
    idle = f"{IDLE}O3--scale", f"{IDLE}O5--output", "no longer accepted since 2020-01-01: O9"
    for letter, notes in (("A", idle), ("B", idle[1:])):
        left(tmp_path / letter, [seen("1")])
        file = tmp_path / letter / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"notes": notes}))
    found = compared(side_run("a", tmp_path / "A"), side_run("b", tmp_path / "B"))
    assert found.notes[1:] == [idle[1], f"A: {idle[2]}", f"B: {idle[2]}"]


def test_what_judged_nothing_says_nothing(run: Any) -> None:
    assert run([seen("1", rules=[])], [seen("1", rules=[])])[0] == 4
    assert run([seen("1")], [seen("2")])[0] == 4


def test_a_run_that_does_not_end_compares_nothing(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([], [], codes=(3, 0))[0] == 3
    assert "A: its run ended with 3" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"B, .*no such recipe"):
        run([], [], codes=(0, 2))


def test_an_intended_change_is_accepted_once_and_for_later(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "accepted.toml"
    asked = Accepting(file, 'powers of "two"\nfrom now on', "2999-01-31")
    name = "O3--operand--eager--scale [value]--r"
    code, told = run([seen("1")], [seen("1", shows=[name])], {name: {}}, accepting=asked)
    assert code == 0 and told["differences"][0]["accepted"]
    (entry,) = suppressions(file)
    assert entry.reason == asked.reason and entry.until == datetime.date(2999, 1, 31)
    honoured = accepted((), file, datetime.date.today())

    class Found:
        fingerprint, severity = name, "high"

    assert honoured.why(Found())  # type: ignore[arg-type]
    Found.fingerprint = "O3--operand--eager--scale v--r"
    assert not honoured.why(Found()), "its brackets are no class of letters"  # type: ignore[arg-type]
    more = Accepting(file, "and another", "")
    assert run([seen("1")], [seen("1", shows=["y"])], {"y": {}}, accepting=more)[0] == 0
    assert [one.fingerprint for one in suppressions(file)][1:] == ["y"]


def test_what_is_gone_with_b_is_not_accepted(run: Any, tmp_path: Path) -> None:
    """Its entry would only hide that it comes back."""
    asked = Accepting(tmp_path / "accepted.toml", "meant")
    code, _ = run([seen("1", shows=["x"])], [seen("1")], of_a={"x": {}}, accepting=asked)
    assert code == 1 and not (tmp_path / "accepted.toml").exists()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Accepting(Path("a.toml")), "say by --reason"),
        (Accepting(Path("a.toml"), "why", "soon"), "is no day"),
        (Accepting(Path("a.toml"), "why", "2020-01-01"), "is not in the future"),
        (Accepting(Path("nowhere/a.toml"), "why"), "folder does not exist"),
        (Accepting(None, "why"), "--accept FILE"),
    ],
)
def test_what_cannot_be_accepted_is_refused(asked: Accepting, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_accepting(asked)


def test_without_a_file_nothing_is_accepted(tmp_path: Path) -> None:
    for letter in "AB":
        left(tmp_path / letter, [seen("1")])
    found = compared(side_run("a", tmp_path / "A"), side_run("b", tmp_path / "B"))
    assert write_accepted(found, Accepting()) == (found, ())


def test_a_side_is_a_python_an_environment_or_packages(tmp_path: Path) -> None:
    assert side_of(sys.executable).python == sys.executable
    assert side_of(str(tmp_path)) == Side(str(tmp_path), sys.executable, str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    assert side_of(str(tmp_path)).python == str(tmp_path / "bin" / "python")
    with pytest.raises(ValueError, match="is no Python, no environment, no folder"):
        side_of(str(tmp_path / "nothing"))


def test_a_package_itself_is_no_folder_of_packages(tmp_path: Path) -> None:
    """Laid over the others it replaced nothing, and "No difference" was the answer."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match=rf"is a package: .* contains it, '{tmp_path}'"):
        side_of(str(tmp_path / "torchao"))


def test_that_both_sides_tested_the_same_is_said(tmp_path: Path) -> None:
    for letter in "AB":
        left(tmp_path / letter, [seen("1")])
    a, b = side_run("a", tmp_path / "A"), side_run("b", tmp_path / "B")
    (note,) = compared(a, b).notes
    assert note.startswith("both sides tested torch 2, torchao 1, from the same place")
    environment = {**b.environment, "checkouts": {"torchao": "/elsewhere/torchao"}}
    assert not compared(a, replace(b, environment=environment)).notes


def test_a_folder_that_is_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        compare_command(sys.executable, sys.executable, CompareOptions(tmp_path))


def test_a_side_that_fails_stops_the_other(tmp_path: Path) -> None:
    """There is nothing to compare, and nobody waits for the one that has minutes to go."""
    fails, sleeps = tmp_path / "fails", tmp_path / "sleeps"
    fails.write_text("#!/bin/sh\necho 'narrowfuzz: a sentence'\nexit 2\n")
    sleeps.write_text("#!/bin/sh\nexec sleep 300\n")
    for file in (fails, sleeps):
        file.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"B, .*a sentence"):
        compare_command(str(sleeps), str(fails), CompareOptions(tmp_path / "out"))
    assert time.monotonic() - began < 60


CASE = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())


def judgement(*symptoms: str) -> Judgement:
    causes = tuple(Verdict("O3", "eager", "output", "diverged", one) for one in symptoms)
    return Judgement(CASE, "torch", causes, causes, ())


def test_what_the_other_side_shows_too_is_not_looked_into(tmp_path: Path) -> None:
    a, b = (SideRecorder(tmp_path / x, tmp_path / y, FIRST) for x, y in ("AB", "BA"))
    for side, symptoms in ((a, ["both", "a"]), (b, ["both"])):
        side.begin(CASE)
        side.judged(CASE, judgement(*symptoms), ())
    waiting: list[float] = []
    found: list[Any] = []

    def look() -> None:
        deadline = time.monotonic() + 60
        found.append(a.differing(deadline, lambda: waiting.append(time.monotonic())))

    thread = threading.Thread(target=look)
    thread.start()
    while not waiting:
        time.sleep(0.01)  # it waits for the other, and says that it is alive
    assert not found
    assert b.differing(time.monotonic() + 60, lambda: None) == []
    thread.join(60)
    ((name, kept),) = found[0]
    assert name == "O3--operand--eager--a--torch" and kept[0].case == CASE
    assert [one.case for one in read_seen(tmp_path / "B")] == [CASE.id]


def test_nobody_waits_for_a_side_that_is_over(tmp_path: Path) -> None:
    a = SideRecorder(tmp_path / "A", tmp_path / "B", FIRST)
    (tmp_path / "B").mkdir()
    (tmp_path / "B" / "summary.json").write_text("{}")
    assert a.differing(time.monotonic() + 60, pytest.fail) == []


def test_equal_bits_have_equal_hashes_but_for_the_sign_of_nan() -> None:
    def hashed(output: Sequence[float], codes: Sequence[int], scale: float) -> Any:
        operand = Seen(codes=np.array([codes], np.uint8), scale=np.float32([scale]))
        site = SiteTrace(Site("proj", "output", "forward"), operand, operand)
        outputs = {"output": np.array([output], np.float32)}
        return hashes_of({"eager": Trace("eager", outputs=outputs, sites=(site,))})["eager"]

    plain = hashed([1.0, np.nan], [0x7F, 1], 2.0)
    assert plain == hashed([1.0, -np.nan], [0xFF, 1], 2.0)
    for other, kind in (
        (hashed([1.0000001, np.nan], [0x7F, 1], 2.0), "results"),
        (hashed([1.0, np.nan], [0x7F, 2], 2.0), "operands"),
        (hashed([1.0, np.nan], [0x7F, 1], 2.0000002), "scales"),
    ):
        assert [name for name in plain if plain[name] != other[name]] == [kind]
    assert hashed([0.0], [1], 2.0) != hashed([-0.0], [1], 2.0)


def changed(folder: Path, old: str, new: str) -> str:
    """A copy of torchao in a folder, with this put in the place of that in float8_utils.py."""
    source = Path(torchao.__path__[0])
    shutil.copytree(source, folder / "torchao", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "torchao" / "float8" / "float8_utils.py"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    return str(folder)


SCALE = "        res = torch.finfo(float8_dtype).max / torch.clamp(amax, min=EPS)\n"


@pytest.mark.heavy
@pytest.mark.slow
def test_a_planted_bug_is_found_and_can_be_accepted(tmp_path: Path) -> None:
    """A quotient that is rounded twice, over the library that is installed."""
    twice = SCALE.replace("torch.finfo(float8_dtype).max / torch.clamp(amax, min=EPS)",
                          "(1.0 / torch.clamp(amax, min=EPS)).float() "
                          "* torch.finfo(float8_dtype).max")  # fmt: skip
    bug, plain = changed(tmp_path / "bug", SCALE, twice), tmp_path / "plain"
    plain.mkdir()
    more = ["--recipe", "torchao.float8.tensorwise", "--model", "linear", "--arm", "eager"]
    file = tmp_path / "accepted.toml"

    def run(name: str, *options: str, accepting: Accepting = Accepting()) -> Any:  # noqa: B008
        given = CompareOptions(
            tmp_path / name, cases=48, more=[*more, *options], accepting=accepting
        )
        return compare_command(str(plain), bug, given)

    code, told = run("first")
    found = [one for one in told["differences"] if one["side"] == "B" and one["counts"]]
    assert code == 1 and any(one["fingerprint"].startswith("O3--operand") for one in found)
    assert all((tmp_path / "first" / one["script"]).is_file() for one in found)
    assert told["bits"]["differ"]["scales"] > 0 and told["cases"]["both"] == 48
    assert told["sides"][1]["checkouts"].keys() == {"torchao"}
    code, told = run("second", accepting=Accepting(file, "meant"))
    assert code == 0 and suppressions(file)
    code, told = run("third", "--suppress", str(file))
    assert code == 0 and all("meant" in one["accepted"] for one in told["differences"])


@pytest.mark.heavy
@pytest.mark.slow
def test_a_legal_rewrite_is_silent(tmp_path: Path) -> None:
    same = (
        "        bounded = torch.maximum(amax, torch.full_like(amax, EPS))\n"
        "        res = torch.div(torch.finfo(float8_dtype).max, bounded)\n"
    )
    legal, plain = changed(tmp_path / "legal", SCALE, same), tmp_path / "plain"
    plain.mkdir()
    options = CompareOptions(
        tmp_path / "out", cases=16,
        more=["--recipe", "torchao.float8.tensorwise", "--model", "linear", "--arm", "eager"],
    )  # fmt: skip
    code, told = compare_command(str(plain), legal, options)
    assert (code, told["differences"]) == (0, [])
    assert not any(told["bits"]["differ"].values()) and told["bits"]["compared"]["scales"] > 0
