"""The score: hunts from outside, and what is counted of them."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fresh import command, ends
from narrowfuzz.case.events import Backward, Close, Forward, Open
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case, load_case
from narrowfuzz.plants.legal_plain import PLANTS
from narrowfuzz.power import hunt as hunting
from narrowfuzz.power import score as scoring
from narrowfuzz.power.effect import Tried, digest
from narrowfuzz.power.hunt import Limits, control, in_our_reference, targets
from narrowfuzz.power.miss import _measured
from narrowfuzz.power.recall import percentile, recall, summarise, wilson
from narrowfuzz.power.record import (
    Controlled,
    Hunted,
    Miss,
    Score,
    compare,
    false_alarms,
    load_score,
    to_json,
)
from narrowfuzz.power.report import print_control
from narrowfuzz.report.tally import Tally
from narrowfuzz.triage.forms import form_of
from rich.console import Console

FILE = """
from contextlib import contextmanager, nullcontext
from narrowfuzz import Plant

@contextmanager
def doubled(lifts):
    from torchao.float8 import float8_utils
    original = float8_utils.amax_to_scale
    float8_utils.amax_to_scale = lambda *args, **kwargs: original(*args, **kwargs) * 2
    yield
    if lifts:
        float8_utils.amax_to_scale = original

def nowhere():
    raise RuntimeError("no such place")

def fault(id, plant, recipe="torchao.float8.tensorwise"):
    return Plant(id=id, family="mine", title=id, source="none", plant=plant, recipes=(recipe,))

PLANTS = [
    fault("doubled", lambda: doubled(True)),
    fault("stays", lambda: doubled(False)),
    fault("nothing", nullcontext),
    fault("raises", nowhere),
    fault("elsewhere", nullcontext, "torchao.flaot8.*"),
]
"""


def hunted(id: str, found: bool, **more: Any) -> Hunted:
    return Hunted(id=id, title=id, link="", found=found, **{"family": "scale", **more})


def score(*faults: Hunted, controls: tuple[Controlled, ...] = ()) -> Score:
    return Score(
        versions={}, seed=0, seconds=60.0, compiled_seconds=600.0, faults=faults, controls=controls
    )


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return command("score", *args, seconds=400, code=None)


@pytest.mark.heavy
def test_a_fault_file_is_hunted_and_what_cannot_be_is_named(tmp_path: Path) -> None:
    faults, broken = tmp_path / "faults.py", tmp_path / "broken.py"
    faults.write_text(FILE)
    broken.write_text("raise RuntimeError('a mistake')")
    out, before = tmp_path / "score.json", tmp_path / "before.json"
    done = run(
        "--faults", str(faults), "--faults", str(broken), "--no-builtin", "--no-controls",
        "--seconds", "60", "--cases", "40", "--arm", "eager", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    told = json.loads(out.read_text())
    by_id = {fault["id"]: fault for fault in told["faults"]}
    assert by_id["doubled"]["found"] and by_id["doubled"]["rule"] == "O3"
    assert by_id["doubled"]["seconds"] > 0 and by_id["doubled"]["cases"] >= 1
    assert by_id["doubled"]["fingerprint"].startswith("O3--operand--eager--scale off")
    assert not any("ended before" in why for why in by_id["doubled"]["suspected"])
    assert "cannot be lifted" in by_id["stays"]["problem"]
    assert by_id["nothing"]["idle"] and not by_id["nothing"]["found"]
    assert "raises RuntimeError when planted: no such place" in by_id["raises"]["problem"]
    assert "no recipe torchao.flaot8.* runs" in by_id["elsewhere"]["problem"]
    assert told["summary"]["all"]["of"] == 2 and told["controls"] == []
    for sentence in (
        "broken.py raised RuntimeError: a mistake",
        "nothing: its code ran in none",
    ):
        assert sentence in done.stderr
    # what the file has is not hunted again, but for what could not be
    further = run(
        "--faults", str(faults), "--no-builtin", "--no-controls", "--only", "doubled",
        "--only", "nothing", "--only", "elsewhere", "--cases", "40", "--arm", "eager",
        "--json", str(out), "--resume",
    )  # fmt: skip
    assert further.returncode == 2 and "has 2 of 3, which are not run again" in further.stdout
    assert {f["id"]: f for f in json.loads(out.read_text())["faults"]} == by_id
    # an earlier score that found what this one cannot: recall is lost
    claimed = score(hunted("nothing", True), hunted("gone", True))
    before.write_bytes(to_json(claimed, {}))
    again = run(
        "--faults", str(faults), "--only", "nothing", "--no-builtin", "--no-controls",
        "--seconds", "2", "--against", str(before),
    )  # fmt: skip
    assert again.returncode == 1 and "lost since the earlier score: nothing" in again.stdout


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({}, "its code ran in none of 60 cases drawn for that"),
        ({"ran": 4}, "its code ran in 4 of 60 cases drawn for that, and changed nothing"),
        ({"ran": 4, "changed": 2}, "it changed 2 of 60 cases drawn for that, and no rule judged"),
        ({"changed": 2, "judged": 1}, "it changed 2 of 60 cases drawn for that, and every rule"),
        ({"changed": 2, "judged": 2, "seen": {"O1": 1, "O5": 2}}, "rules saw that (O1 in 1, O5 in"),
        ({"problem": "no answer"}, "why is not measured: no answer"),
    ],
)
def test_why_a_fault_was_missed_is_the_first_thing_it_did_not_come_to(
    counts: dict[str, Any], says: str
) -> None:
    assert says in Miss(**{"cases": 60, "ran": 0, "changed": 0, "judged": 0, **counts}).why


@pytest.mark.heavy
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("recipe", "shown"),
    [("torchao.float8.tensorwise", {"O3"}), ("torchao.mxfp8.rceil", set())],
)
def test_it_is_measured(tmp_path: Path, recipe: str, shown: set[str]) -> None:
    """The fault of float8's scales does nothing to MX, whose cases never run its code."""
    (file := tmp_path / "faults.py").write_text(FILE)
    tried = Tried(str(file), "doubled", (recipe,), (), "cpu", 0)
    found = tried.answer(partial(_measured, number=2))
    assert found is not None and found.cases == 2
    assert bool(found.ran) == bool(found.changed) == bool(shown) and shown <= {*found.seen}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--only", "no-such-fault"), "matches no fault and no control"),
        (("--seconds", "0"), "--seconds must be above 0"),
        (("--no-builtin", "--no-controls"), "leave nothing to do"),
        (("--against", "no-such.json"), "no-such.json is not a score's JSON"),
        (("--json", "no/such/folder/x.json"), "there is no folder"),
        (("--arm", "no-such-arm"), "unknown arm"),
        (("--resume",), "--resume goes on with the file of --json"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    args: tuple[str, ...], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends("score", *args) == 2
    out, err = capfd.readouterr()
    assert sentence in err and not out


class TestRecall:
    def test_the_interval_is_wilsons(self) -> None:
        low, high = wilson(8, 10)  # Newcombe, Statistics in Medicine 17 (1998), method 3
        assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
        assert wilson(0, 0) == (0.0, 1.0)
        assert wilson(10, 10)[1] == 1.0 and wilson(0, 10)[0] == 0.0

    def test_a_percentile_is_one_of_the_values(self) -> None:
        assert percentile([3.0, 1.0, 2.0], 0.9) == 3.0
        assert percentile(range(1, 11), 0.9) == 9
        assert np.isnan(percentile([], 0.9))

    def test_how_soon_faults_are_found_is_told_by_kind(self) -> None:
        found = summarise(
            [
                *(hunted(str(i), True, seconds=float(i)) for i in (1, 12, 30)),
                hunted("missed", False),
                hunted("raises", False, problem="raises"),
                hunted("ranks", True, seconds=5.0, family="sharding"),
                hunted("compiled", True, seconds=100.0, compiled=True),
            ]
        )
        eager, ranks, compiled = (found.speeds[kind] for kind in ("eager", "ranks", "compiled"))
        assert (eager.of, eager.within) == (4, {10: 1, 20: 2, 60: 3})
        assert (eager.median, eager.ninetieth) == (12.0, 30.0)
        assert (ranks.of, ranks.within[10], compiled.within[60]) == (1, 1, 0)

    def test_what_could_not_be_hunted_is_not_counted(self) -> None:
        share = recall(
            [hunted("a", True), hunted("b", False), hunted("c", False, problem="raises")]
        )
        assert (share.found, share.of) == (1, 2)

    def test_compiled_faults_are_timed_apart(self) -> None:
        found = summarise(
            [
                hunted("a", True, seconds=1.0),
                hunted("b", True, seconds=3.0, ours=True),
                hunted("c", True, seconds=500.0, compiled=True, family="fusion"),
            ]
        )
        assert (found.median, found.ninetieth, found.compiled_slowest) == (2.0, 3.0, 500.0)
        assert (found.libraries.of, found.references.of, found.compiled.of) == (2, 1, 1)
        assert sorted(found.families) == ["fusion", "scale"]


class TestRecord:
    def test_json_survives_and_its_schema_is_checked(self, tmp_path: Path) -> None:
        first = score(hunted("a", True, seconds=1.5), controls=(silent("c"),))
        path = tmp_path / "score.json"
        path.write_bytes(to_json(first, {"summary": {"more": 1}}))
        assert load_score(path) == first
        path.write_bytes(to_json(msgspec.structs.replace(first, schema=99), {}))
        with pytest.raises(ValueError, match="schema 99"):
            load_score(path)

    def test_a_run_goes_on_with_what_an_earlier_one_left(self, tmp_path: Path) -> None:
        file = tmp_path / "score.json"
        options = scoring.ScoreOptions(out=file, resume=True)
        nothing = scoring._earlier(options)
        assert nothing.faults == nothing.controls == ()
        one, two = hunted("one", True), hunted("two", False)
        have = scoring._with(scoring._with(nothing, two, ["one", "two"]), one, ["one", "two"])
        assert have.faults == (one, two)
        scoring._write(file, have)
        assert scoring._earlier(options) == have and list(tmp_path.iterdir()) == [file]
        better = hunted("two", True)
        assert scoring._with(have, better, ["one", "two"]).faults == (one, better)
        for limits, said in (
            (Limits(seed=1), "with seed 0, this run has 1: name another file"),
            (Limits(arms=("eager", "inductor")), "with arms all, this run has eager inductor"),
            (Limits(cases=9), "with cases 0, this run has 9"),
        ):
            with pytest.raises(ValueError, match=said):
                scoring._earlier(dataclasses.replace(options, limits=limits))
        fresh = dataclasses.replace(options, resume=False, limits=Limits(seed=1))
        assert scoring._earlier(fresh).faults == ()

    def test_a_false_alarm_is_printed_and_saved_with_its_case(self, tmp_path: Path) -> None:
        case = Case(spec=Spec(recipe="torch.bf16", m=3), data=DataSpec(seed=7))
        alarms = {"O5--x": msgspec.Raw(dump_case(case))}
        control = msgspec.structs.replace(silent("plain", "O5--x"), alarms=alarms)
        printed = io.StringIO()
        print_control(Console(file=printed, width=1000), control)
        assert f"its case: {dump_case(case).decode()}" in printed.getvalue()
        file = tmp_path / "score.json"
        scoring._write(file, msgspec.structs.replace(score(), controls=(control,)))
        (read,) = load_score(file).controls
        assert load_case(bytes(read.alarms["O5--x"])) == case

    def test_two_scores_compared(self) -> None:
        before = score(hunted("a", True), hunted("b", False), hunted("old", True))
        now = score(hunted("a", False), hunted("b", True), hunted("new", True))
        change = compare(before, now)
        assert (change.lost, change.gained) == (("a",), ("b",))

    def test_a_finding_on_a_control_is_a_false_alarm(self) -> None:
        assert false_alarms([silent("c"), silent("d", "O1--output")]) == ("d: O1--output",)


def silent(id: str, *findings: str) -> Controlled:
    return Controlled(id=id, title=id, cases=500, seconds=1.0, findings=findings)


class TestDigest:
    def test_every_bit_counts(self) -> None:
        x = np.arange(4, dtype=np.float32)
        y = x.copy()
        y.view(np.uint8)[0] ^= 1
        assert digest({"a": (x, None)}) == digest({"a": (x.copy(), None)})
        assert len({digest({"a": v}) for v in (x, y, x[:3], x.astype(np.float64))}) == 4
        assert digest(frozenset("abc")) == digest(frozenset("cba")) != digest(frozenset("ab"))
        assert digest([1, "1"]) != digest(["1", 1]) and digest(b"1") != digest("1")

    def test_records_count_but_for_what_names_places_in_memory(self) -> None:
        @dataclasses.dataclass
        class Record:
            value: float
            message: str

        assert digest(Record(1.0, "here")) == digest(Record(1.0, "there"))
        assert digest(Record(1.0, "")) != digest(Record(2.0, ""))


def test_size_is_elements_or_events() -> None:
    linear = Spec(recipe="r", m=2, k=3, n=5)
    assert form_of(linear).size(linear) == 6 + 15 + 10
    events = (Open(), Forward(), Close(), Backward(of=(0,)))
    spec = Spec(recipe="r", model="library_linear", events=events)
    assert form_of(spec).size(spec) == 4


def test_which_faults_are_in_our_own_references() -> None:
    assert in_our_reference(("reference.delayed",))
    assert not in_our_reference(("reference.*", "torchao.*"))


def test_a_control_that_breaks_is_told_and_so_is_one_that_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: Any, store: Any, progress: Any, tally: Tally) -> None:
        tally.broken = True
        tally.notes.append("a worker raised")

    monkeypatch.setattr(hunting, "play", broken)
    plain = PLANTS[0]
    nowhere = dataclasses.replace(plain, id="nowhere", recipes=("torch.pf32",))
    work = targets([("", plain), ("", nowhere)], "cpu")
    told = [control(one, Limits(control_cases=1), Tally()) for one in work]
    assert [one.problem for one in told] == [
        "a worker raised; only 0 of 1 cases", "no recipe torch.pf32 runs: there is none"
    ]  # fmt: skip
    assert scoring._code(score(controls=tuple(told)), None) == 2
    assert f"control {plain.id}: a worker raised" in capsys.readouterr().err


def test_what_an_interruption_leaves_undone_is_left_out() -> None:
    tallies: list[Tally] = []

    def one(piece: int, tally: Tally) -> int:
        if piece == 1:
            for other in tallies:
                other.interrupted = True
        return piece

    done: list[int] = []
    scoring._side_by_side([0, 1, 2], 1, tallies, one, done.append)
    assert done == [0]
