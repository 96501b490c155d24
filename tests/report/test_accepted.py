"""What makes no run fail: a baseline and accepted findings; and what a CI reads of a run."""

from __future__ import annotations

import datetime
import html
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from markdown_it import MarkdownIt
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.ledger.ledger import Ledger, load_entries
from narrowfuzz.report.accepted import Accepted, Changed, accepted
from narrowfuzz.report.formats import write_formats
from narrowfuzz.report.glossary import new_and_known
from narrowfuzz.report.issue import issue_text
from narrowfuzz.report.judged import Judged
from narrowfuzz.report.markdown import plain, write_markdown
from narrowfuzz.report.outcome import Ended
from narrowfuzz.report.store import Store
from narrowfuzz.report.summary import print_summary
from narrowfuzz.report.tally import Tally
from narrowfuzz.triage.finding import Finding, conditions, report
from rich.console import Console

TODAY = datetime.date(2026, 11, 23)
RECIPE, ARM = "torchao.float8.rowwise", "inductor"
CASE = Case(spec=Spec(recipe=RECIPE, backend="real"), data=DataSpec())
FINDING = Finding(
    id="0123456789ab", fingerprint="O5--output--inductor--wrong value--torchao.float8",
    severity="medium", recipe=RECIPE, rule="O5", arm=ARM, role="output", symptom="wrong value",
    sentence="output wrong value at [0, 0]: got <1>, must be 2 & more", strength="bound",
    reach="gaussian", case=CASE, minimal=CASE, flake="always", effect=0.25, needs=["bias=True"],
    environment={"versions": {"torch": "2.13.0", "torchao": "0.18.0", "numpy": "absent"}},
    script_output="output[0, 0]: 1, must be 2",
)  # fmt: skip
OTHER = msgspec.structs.replace(
    FINDING, id="abcdef012345", fingerprint="O1--output--eager--differs on repeat--torchao.float8",
    arm="eager", rule="O1", severity="high",
)  # fmt: skip
SHARE = Judged(
    frozenset({(RECIPE, "eager", "linear"), (RECIPE, ARM, "linear")}),
    ((RECIPE, "inductor", "attention"),),
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "run")
    for finding in (FINDING, OTHER):
        store.add(finding, "raise SystemExit(1)\n")
    suspected = msgspec.structs.replace(
        OTHER, id="9" * 12, why_suspected="no script", fingerprint="x"
    )
    store.add(suspected, "")
    return store


def of(store: Store, counts: Counter[Any], **more: Any) -> Ended:
    """A run with these counts that has ended."""
    fields: dict[str, Any] = {"share": SHARE, "accepted": Accepted(), "first": 3, **more}
    return Ended(Tally(counts), store, Ledger(load_entries()), **fields)


def on_terminal(ended: Ended) -> str:
    """What is said at its end."""
    console = Console(file=io.StringIO(), width=400)
    print_summary(console, console, ended)
    return console.file.getvalue()  # type: ignore[attr-defined]


def written(folder: Path, text: str) -> Path:
    file = folder / "accepted.toml"
    file.write_text(text)
    return file


ENTRY = """
[[suppress]]
fingerprint = "O5--*--torchao.float8"
reason = "our own patch changes the scale"
until = 2027-01-01
"""


def test_what_a_baseline_has_seen_does_not_count(store: Store, tmp_path: Path) -> None:
    here = accepted((store.out,), None, TODAY)
    assert here.counting([FINDING, OTHER]) == []
    new = msgspec.structs.replace(FINDING, fingerprint="O2--another")
    assert here.counting([FINDING, new]) == [new]
    assert accepted((), None, TODAY).counting([FINDING]) == [FINDING]


def test_a_baseline_tells_what_is_new_what_stayed_and_what_is_gone(store: Store) -> None:
    assert store.fingerprints() == {FINDING.fingerprint, OTHER.fingerprint, "x"}
    here = accepted((store.out,), None, TODAY)
    assert here.changed(["new", "x"]) == Changed(
        ("new",), ("x",), (OTHER.fingerprint, FINDING.fingerprint)
    )
    assert accepted((), None, TODAY).changed(["new"]) is None


@pytest.mark.parametrize(
    ("ran", "seen", "says"),
    [
        (0, True, "Found 2 problems in m.py:build (1 high, 1 medium): output wrong value"),
        (0, False, "m.py:build: nothing was checked"),
        (
            2,
            False,
            "No problems found in m.py:build so far, but only 2 of its first 3 cases were",
        ),
        (3, True, "Found 2 problems in m.py:build (1 high, 1 medium): output wrong value"),
        (3, False, "No problems found in m.py:build but those that are accepted. "),
    ],
)
def test_nothing_is_said_to_be_found_only_if_what_comes_first_ran(
    store: Store, ran: int, seen: bool, says: str
) -> None:
    known = accepted(() if seen else (store.out,), None, TODAY)
    counts = Counter(cases=10 * ran, first=ran)
    assert of(store, counts, accepted=known, subject="m.py:build").soundness().startswith(says)


def test_of_what_nobody_looked_at_nothing_good_is_said(tmp_path: Path) -> None:
    counts = Counter[Any](cases=9, first=3)
    ended = of(Store(tmp_path), counts, subject="m.py:build")
    assert ended.soundness().startswith("No problems found in m.py:build. ") and not ended.lacking
    idle = of(Store(tmp_path), counts, subject="m.py:build", share=Judged(frozenset(), ()))
    assert idle.lacking and "so far, but no rule could judge" in idle.soundness()


def test_what_is_milder_than_asked_does_not_count_anywhere() -> None:
    here = accepted((), None, TODAY, "high")
    assert here.counting([FINDING, OTHER]) == [OTHER]
    assert here.why(FINDING) == "medium, and --fail-on is high"
    assert accepted((), None, TODAY, "low").counting([FINDING, OTHER]) == [FINDING, OTHER]


def test_several_runs_are_one_baseline(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    new = msgspec.structs.replace(FINDING, fingerprint="O2--another", id="b" * 12)
    other.add(new, "")
    assert accepted((store.out, other.out), None, TODAY).counting([FINDING, OTHER, new]) == []
    assert accepted((other.out,), None, TODAY).counting([FINDING, new]) == [FINDING]


def test_a_suppression_holds_until_its_day(tmp_path: Path) -> None:
    file = written(tmp_path, ENTRY)
    assert accepted((), file, TODAY).counting([FINDING, OTHER]) == [OTHER]
    assert "our own patch" in accepted((), file, TODAY).why(FINDING)
    late = datetime.date(2027, 1, 1)
    assert accepted((), file, late).counting([FINDING, OTHER]) == [FINDING, OTHER]


def test_what_is_out_of_date_is_said(tmp_path: Path) -> None:
    other = ENTRY.replace("O5--*", "O2--*")
    file = written(tmp_path, ENTRY + other + other.replace("2027", "2026"))
    here = accepted((), file, TODAY)
    idle, over = "O2--*--torchao.float8", "no longer accepted since 2026-01-01"
    assert here.stale([FINDING]) == [
        f"{over}: {idle}", f"accepted, but not seen in this run: {idle}"
    ]  # fmt: skip
    assert accepted((), written(tmp_path, ENTRY), TODAY).stale([FINDING, OTHER]) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ENTRY.replace("our own patch changes the scale", " "), "has no reason"),
        (ENTRY.replace("reason =", "# reason ="), "missing required field `reason`"),
        (ENTRY.replace("until =", "# until ="), "missing required field `until`"),
        (ENTRY.replace("2027-01-01", '"soon"'), "date"),
        ("suppress = 1", "array"),
        ("[[suppress", "--suppress"),
    ],
)
def test_a_suppression_that_says_too_little_is_refused(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ValueError, match="--suppress") as caught:
        accepted((), written(tmp_path, text), TODAY)
    assert says in str(caught.value)


def test_a_baseline_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run is there"):
        accepted((tmp_path,), None, TODAY)
    (tmp_path / "findings.db").write_text("not a database, but long enough to be looked at as one")
    with pytest.raises(ValueError, match="--baseline"):
        accepted((tmp_path,), None, TODAY)
    with pytest.raises(ValueError, match="No such file"):
        accepted((), tmp_path / "nothing.toml", TODAY)


def outputs(store: Store, here: Accepted) -> tuple[list[dict[str, Any]], Any, dict[str, Any]]:
    write_formats(of(store, Counter(), accepted=here))
    rows = [json.loads(line) for line in (store.out / "findings.jsonl").read_text().splitlines()]
    suite = ElementTree.parse(store.out / "junit.xml").getroot()
    return rows, suite, json.loads((store.out / "findings.sarif").read_text())


def test_lines_of_json_hold_what_was_shown_and_what_was_suspected(store: Store) -> None:
    rows, _, _ = outputs(store, Accepted(frozenset({OTHER.fingerprint})))
    by_id = {row["id"]: row for row in rows}
    assert by_id[FINDING.id]["counts"] and by_id[FINDING.id]["sentence"] == FINDING.sentence
    assert not by_id[OTHER.id]["counts"] and by_id[OTHER.id]["accepted"] == "in the baseline"
    assert by_id["9" * 12]["status"] == "suspected" and not by_id["9" * 12]["counts"]
    for row in rows:
        assert (store.out / row["script"]).is_file() and (store.out / row["case"]).is_file()


def test_junit_has_a_test_for_each_place_that_failed_passed_or_was_never_judged(
    store: Store,
) -> None:
    _, suite, _ = outputs(store, Accepted(frozenset({OTHER.fingerprint})))
    assert {n: suite.get(n) for n in ("tests", "failures", "skipped", "errors")} == {
        "tests": "3", "failures": "1", "skipped": "1", "errors": "0",
    }  # fmt: skip
    tests = {test.get("name"): test for test in suite}
    (failure,) = tests["inductor / linear"].findall("failure")
    assert failure.get("message") == FINDING.sentence and FINDING.id in (failure.text or "")
    assert len(tests["eager / linear"]) == 0, "what it shows is in the baseline"
    assert tests["inductor / attention"].find("skipped") is not None


def test_sarif_names_rule_level_fingerprint_and_script(store: Store) -> None:
    _, _, sarif = outputs(store, Accepted(frozenset({OTHER.fingerprint})))
    (run,) = sarif["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["O1", "O5"]
    results = {result["ruleId"]: result for result in run["results"]}
    assert (results["O5"]["level"], results["O1"]["level"]) == ("warning", "error")
    assert results["O5"]["partialFingerprints"]["narrowfuzz/v1"] == FINDING.fingerprint
    assert "suppressions" not in results["O5"] and results["O1"]["suppressions"]
    place = results["O5"]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert (store.out / place).is_file()


def shown(markdown: str) -> str:
    """Markdown as a code host shows it, without tags."""
    engine = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    return engine.render(markdown)


def text_of(rendered: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", rendered)).strip()


@pytest.mark.parametrize(
    "text",
    [
        "a|b", "1. x", "12) y", "- x", "+ x", "# x", "> q", "=== a", "a_b_c", r"\\| \\",
        "`a` *b* _c_ **d** <b>x</b> &amp; ~~z~~ [l](http://x) ![i](y)", "at @someone & <1>",
    ],
)  # fmt: skip
def test_nothing_in_a_sentence_is_markdown(text: str) -> None:
    assert text_of(shown(f"- {plain(text)}")) == text
    table = shown(f"| a | b |\n| --- | --- |\n| {plain(text)} | z |")
    cells = re.findall(r"<td>(.*?)</td>", table, re.S)
    assert [text_of(cell) for cell in cells] == [text, "z"]
    assert not re.search("@[a-z]", plain(text)), "nobody is mentioned"


def test_a_pull_request_is_told_what_was_found_judged_and_known(store: Store) -> None:
    entry = load_entries()[0]
    under = {("known under", entry.id, "autocast"): 2, ("known under", entry.id, "checkpoints"): 1}
    counts: Counter[Any] = Counter({"cases": 9, ("known", entry.id): 2, **under})
    here = Accepted(frozenset({OTHER.fingerprint}))
    ended = of(store, counts, accepted=here, options=["--recipe-file", "a|b.py"])
    write_markdown(ended)
    rendered = shown((store.out / "summary.md").read_text())
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", rendered,
            re.S)]  # fmt: skip
    (high, medium) = [[text_of(cell) for cell in row] for row in rows if row]
    replay = f"narrowfuzz replay {store.out}/findings/{FINDING.id} --recipe-file 'a|b.py'"
    assert medium == ["medium", FINDING.sentence, RECIPE, BY_NAME[ARM].words, replay]
    assert high[1] == f"{OTHER.sentence} (does not count: in the baseline)"
    told = text_of(rendered)
    assert "New findings: 2 (1 high, 1 medium), known issues that showed: 1; suspected" in told
    assert "can run here (67 %)" in told and "9" * 12 not in told
    each = f"{entry.severity}, 2 times, each with autocast"
    assert f"{entry.id} ({each}): {entry.title}. What helps: {entry.workaround}" in told
    details = rendered[rendered.index("<details>") : rendered.index("</details>")]
    assert "inductor: 1 of 2 combinations of recipe and model" in text_of(details)
    assert "eager" not in details, "all of it was checked"


def test_a_model_is_not_said_to_be_right_if_a_script_gave_no_answer(tmp_path: Path) -> None:
    """As where the fresh process did not find what the model imports."""
    why = "its script cannot tell (exit code 125): ModuleNotFoundError: No module named 'mine'"
    open_, gone = Store(tmp_path / "open"), Store(tmp_path / "gone")
    open_.add(msgspec.structs.replace(FINDING, why_suspected=why, answered=False), "")
    gone.add(msgspec.structs.replace(FINDING, why_suspected="its script passes"), "")
    counts = Counter({"cases": 9, "first": 3})
    said = f"the script of 1 possible problem gave no answer: {FINDING.sentence}"
    assert said in of(open_, counts, subject="m.py:build").lacking
    assert said not in of(gone, counts, subject="m.py:build").lacking


def test_the_command_that_explains_a_finding_can_be_pasted(store: Store) -> None:
    """A finding in a user's model, or of a user's recipe, is not run without naming its file."""
    said = on_terminal(of(store, Counter({"cases": 9}), options=["--model", "a b.py:build"]))
    (command,) = re.findall("what makes it go away: (narrowfuzz explain .*)", said)
    assert command.startswith(f"narrowfuzz explain {store.out}/findings/")
    assert command.endswith(" --model 'a b.py:build'")


def test_an_issue_has_the_claim_the_script_the_versions_and_what_is_open() -> None:
    text = issue_text(FINDING, "import torch\nraise SystemExit(1)\n")
    assert text.startswith(f"# {RECIPE}: output wrong value")
    assert "```python\nimport torch\nraise SystemExit(1)\n```" in text
    assert "Required to reproduce: bias." in text and "off by 25.0% of its size" in text
    assert "- torch 2.13.0" in text and "absent" not in text.split("Where it was seen")[0]
    assert "- not tried on a GPU" in text and "It prints `output[0, 0]: 1, must be 2`" in text
    assert "must be attached" not in text
    long = issue_text(FINDING, "import torch\n" * 500)
    assert "The attached `repro.py` (500 lines" in long and "```" not in long
    open_ = issue_text(msgspec.structs.replace(FINDING, why_suspected="it shows no more"), "")
    assert "**No script reproduces it yet: it shows no more.**" in open_


def test_without_the_ledger_a_run_says_so_and_what_a_finding_looks_like(store: Store) -> None:
    from test_nearest import ALIKE

    ended = of(store, Counter(cases=9), filtered=False, entries=[ALIKE])
    said = "2 findings (1 high, 1 medium): 0 new, 0 known, 2 not compared with known issues"
    assert ended.verdict().startswith(said)
    assert ended.like(FINDING) == f"looks like the known issue {ALIKE.id}" and not ended.like(OTHER)
    write_markdown(ended)
    told = text_of(shown((store.out / "summary.md").read_text()))
    assert said in told and f"(looks like the known issue {ALIKE.id})" in told
    assert "Known issues are listed among the findings" in told
    assert not of(store, Counter(), entries=[ALIKE]).like(FINDING)
    told = on_terminal(ended)
    assert said in told and "listed among the findings" in told
    assert told.count(f"looks like the known issue {ALIKE.id}") == 1


def test_a_finding_that_is_a_known_issue_says_which(store: Store) -> None:
    from test_nearest import ALIKE

    entry = load_entries()[0]
    known = msgspec.structs.replace(FINDING, known_issue=entry.id, severity=entry.severity)
    alone = Store(store.out.parent / "known")
    for finding in (known, msgspec.structs.replace(OTHER, known_issue="")):
        alone.add(finding, "raise SystemExit(1)\n")
    ended = of(alone, Counter(cases=9), filtered=False, entries=[ALIKE])
    assert ended.verdict().partition(": ")[2].startswith("1 new, 1 known (1 issue, ")
    assert "not compared" not in ended.verdict()
    twice = msgspec.structs.replace(known, id="twice", fingerprint="O6--output--of the same")
    assert new_and_known([known, twice]).startswith("0 new, 2 known (1 issue, ")
    assert ended.like(known) == f"this is the known issue {entry.id}", "not one that looks alike"
    new = msgspec.structs.replace(FINDING, known_issue="")
    assert not ended.like(new), "what was asked and is none only resembles one"
    told = report(known, "again")
    assert told.count(f"known issue {entry.id}") == 1
    assert f"narrowfuzz known {entry.id}" in told and "known issue" not in report(new, "again")
    assert on_terminal(ended).count(f"this is the known issue {entry.id}") == 1
    issue = issue_text(known, "pass\n")
    assert issue.index(entry.title) < issue.index("What happens") and issue.count(entry.title) == 1
    assert "Known issue" not in issue_text(new, "pass\n")
    write_formats(ended)
    junit = (alone.out / "junit.xml").read_text()
    assert junit.count(f"this is the known issue {entry.id}") == 1
    rows = map(json.loads, (alone.out / "findings.jsonl").read_text().splitlines())
    assert {row["known_issue"]: row["counts"] for row in rows} == {entry.id: True, "": True}


def test_conditions_can_be_read() -> None:
    needs = ["model=hooked", "bias=True", "attention=math", "grad_mode=no_grad", "reload"]
    assert conditions(needs) == (
        "the model hooked (a linear with hooks and attributes), bias, attention math, "
        "grad mode no_grad, reload"
    )
    assert conditions(["model=mine.py:build#0123", "bias=False"]) == (
        "the model mine.py:build, no bias"
    )
    told = report(msgspec.structs.replace(FINDING, needless=["model=used_twice"]), "again")
    assert "still fails without: the model used_twice (one linear called twice)" in told
    assert "not required" not in told
