"""Findings of stateful cases: minimised over the schedule, shown by a script, told as a story."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from draws import ONCE
from fresh import on_transformer_engine
from hypothesis import given, settings
from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Settings,
    Step,
    Switch,
)
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.library_specs import schedules
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.delayed_operands import PLANTS as OPERANDS
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import find_plant
from narrowfuzz.recipe import delayed
from narrowfuzz.recipe.delayed_subject import carries
from narrowfuzz.report.store import Store, load_finding
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.equal_runs import ALONE, PLAIN, THROUGH
from narrowfuzz.rules.library.evidence import address_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Formats, Is, MadeBy, Same, bits
from narrowfuzz.trace.snapshots import CastSeen, ProductSeen
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.finding import Finding, reach_of, report
from narrowfuzz.triage.minimise import minimise
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.script.layers import of_layers
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.triage import needed, triage
from narrowfuzz.triage.verify import RunScript, ScriptRun, run_script
from samples import every_recipe
from te_on_cpu.environment import VERSION_VARIABLE, ensure

HERE = Path(__file__).parents[1]
FAULTS = str(HERE / "schedule_faults.py")
#: Lines of a script of our own small library, and of TransformerEngine, whose verbs are longer.
MAX_LINES, MAX_TE_LINES = 299, 341
#: Fault -> the rule that a script is written for.
SHOWN_BY = {
    "no_commit": "O14",
    "scale_doubled": "O14",
    "other_scale": "O14",
    "wrong_codes": "O2",
    "wrong_inverse": "O3",
    "present_scales": "O13",
    "never_off": "O20",
    "weight_kept": "O20",
    "left_over": "O19",
    "nudged": "O12",
    "remembers": "O1",
    "rounded_on_save": "R20",
    "raises": "contract",
}
LARGE = Spec(
    recipe="reference.delayed", model="library_linear", m=48, k=32, bias=True, dtype="fp32",
    events=(
        Open(), Forward(shift=3), Forward(), Forward(first=True), Close(),
        Backward(of=(0, 1)), Backward(of=(2,), values="spike"), Step(),
        Open(), Forward(), Forward(), Close(), Backward(of=(3,)), Backward(of=(4,), shift=-4),
        Step(),
        Reload(), Switch(margin=1, history=2),
        Open(), Forward(values="zero"), Forward(mode="eval"), Open(enabled=False), Forward(),
        Close(), Close(), Backward(of=(5,)), Backward(of=(7,)), Step(),
        Open(), Forward(inside=True), Close(), Backward(of=(8,)), Step(),
    ),
    checkpoint="full", wraps="nested", depth=2,
    settings=Settings(history=3, algorithm="most_recent"),
)  # fmt: skip


def case_of(spec: Spec) -> Case:
    return Case(spec=spec, data=DataSpec(seed=4))


def plain(*events: Event) -> Case:
    """These events on the large case's sizes, and nothing else of it."""
    names = ("recipe", "model", "m", "k", "bias", "dtype")
    return case_of(Spec(events=events, **{name: getattr(LARGE, name) for name in names}))


def judge() -> Judge:
    return Judge(every_recipe(), Ledger([]))


def cause_of(judgement: Judgement, rule: str) -> Verdict:
    return next(v for v in judgement.causes if v.rule == rule)


def run_here(script: str, folder: Path) -> int:
    """The script's exit code, in this process."""
    path = folder / "repro.py"
    path.write_text(script)
    delayed.reset()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    delayed.reset()
    return int(str(ended.value.code))


@pytest.mark.one_in(14)
@pytest.mark.parametrize(
    "fault",
    SHOWN_BY,
)
def test_a_script_of_every_rule_shows_its_fault_and_nothing_without(
    fault: str, tmp_path: Path
) -> None:
    """On the large schedule, and on the smallest."""
    tried = judge()
    rule, case = SHOWN_BY[fault], case_of(LARGE)
    with find_plant(FAULTS, fault).plant():
        verdict = cause_of(tried.judge(case), rule)
        wanted = fingerprint(verdict, tried.recipe(case.spec).family)
        small = minimise(case, lambda c: tried.judge(c).cause(wanted) is not None).case
        again = tried.judge(small).cause(wanted)
        assert again is not None
        recipe = tried.recipe(case.spec)
        scripts = [
            write_played_script(of_layers(tried.observe(c), v, recipe))
            for c, v in ((case, verdict), (small, again))
        ]
        assert [run_here(script, tmp_path) for script in scripts] == [1, 1]
    assert [run_here(script, tmp_path) for script in scripts] == [0, 0]
    assert len(small.spec.events) <= 8
    assert len(scripts[1].splitlines()) <= MAX_LINES


@pytest.mark.parametrize("fault", ["bias-added-twice", "bias-never-added"])
def test_a_script_of_a_backward_in_high_precision(fault: str, tmp_path: Path) -> None:
    """Its sums, or a gradient that is missing."""
    tried = judge()
    case = plain(Forward(), Forward(), Backward(of=(0, 1)), Step())
    with operands_fault(fault).plant():
        verdict = cause_of(tried.judge(case), "O22")
        recipe = tried.recipe(case.spec)
        script = write_played_script(of_layers(tried.observe(case), verdict, recipe))
        assert run_here(script, tmp_path) == 1
    assert run_here(script, tmp_path) == 0


def operands_fault(name: str) -> Plant:
    return next(fault for fault in OPERANDS if fault.id.endswith(name))


def test_a_script_trains_first_what_ran_before(tmp_path: Path) -> None:
    case = plain(Open(), Forward(), Close(), Backward(of=(0,)), Step())
    after = msgspec.structs.replace(case, history=(case_of(LARGE), case))
    with find_plant(FAULTS, "scale_doubled").plant():
        tried = judge()
        verdict = tried.judge(case).causes[0]
        recipe = tried.recipe(case.spec)
        script = write_played_script(of_layers(tried.observe(after), verdict, recipe))
        assert run_here(script, tmp_path) == 1
    assert run_here(script, tmp_path) == 0
    assert script.count("\nplay_layers(") == 2 and script.count("\nspec = ") == 2


def test_a_divergence_of_own_layers_is_proven_by_a_script_of_theirs() -> None:
    case = plain(Open(), Forward(), Close(), Backward(of=(0,)), Step())
    ran: list[str] = []

    def failing(script: Path, plant: object = None) -> ScriptRun:
        ran.append(script.read_text())
        return ScriptRun(1 if plant else 0, "")

    with find_plant(FAULTS, "scale_doubled").plant():
        tried = judge()
        verdict = tried.judge(case).causes[0]
        proof = proven(tried, case, verdict, ("", "scale_doubled"), failing)
    assert proof.why == "" and "\nrun = play_layers(" in proof.script and {*ran} == {proof.script}


def test_a_script_of_models_that_differ_in_one_field_makes_each_anew() -> None:
    """The same data and events, another layer."""
    case = plain(Open(), Forward(), Close(), Backward(of=(0,)), Step())
    bare = msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, bias=False))
    tried = judge()
    with find_plant(FAULTS, "scale_doubled").plant():
        verdict = tried.judge(case).causes[0]
        evidence = tried.observe(msgspec.structs.replace(case, history=(bare,)))
        script = write_played_script(of_layers(evidence, verdict, tried.recipe(case.spec)))
    assert "bias=False" in script and "bias=True" in script


@pytest.mark.heavy
@settings(ONCE, max_examples=5)
@given(schedules(LARGE.recipe, carries=carries()))
def test_scripts_of_a_clean_schedule_hold(spec: Spec) -> None:
    """Every rule, on every arm and slot that it could have been broken at."""
    sizes = {name: getattr(LARGE, name) for name in ("m", "k", "bias", "dtype")}
    tried, case = judge(), case_of(msgspec.structs.replace(spec, **sizes))
    assert not tried.judge(case).causes
    evidence, recipe = tried.observe(case), tried.recipe(case.spec)
    with tempfile.TemporaryDirectory() as folder:
        for verdict in sample(list(possible(evidence))):
            script = write_played_script(of_layers(evidence, verdict, recipe))
            assert run_here(script, Path(folder)) == 0, (verdict, script)


def sample(verdicts: list[Verdict]) -> list[Verdict]:
    """At most two of each rule."""
    by_rule: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_rule.setdefault(verdict.rule, []).append(verdict)
    return [v for same in by_rule.values() for v in (same[0], same[-1])]


def possible(evidence: Evidence) -> Iterator[Verdict]:
    """Verdicts that a faulty library could have had, one of each kind."""
    step = next((i for i, e in enumerate(evidence.spec.events) if isinstance(e, Step)), 0)
    for arm, trace in evidence.in_one_process.items():
        yield Verdict("O19", arm, "state", "diverged", at=At(what="pending", event=step))
        for event, seen in ((m.event, s) for m in trace.moments for s in (*m.casts, *m.products)):
            yield from possible_at(evidence, arm, event, seen)
        slots = sorted(trace.moments[-1].state)[:3]
        runs = [("O12", PLAIN)] if arm != "eager" else [("O1", ALONE), ("R20", THROUGH)]
        for at in (At(name="y0"), *(slot.at(len(trace.moments) - 1) for slot in slots)):
            for rule, name in runs:
                expect = Same(msgspec.structs.replace(at, run=name))
                yield Verdict(rule, arm, "output", "diverged", at=at, expect=expect)
        for slot in slots:
            for what in ("state", "cast"):
                at = msgspec.structs.replace(slot.at(0), what=what)
                yield Verdict("O14", arm, slot.direction, "diverged", at=at)


def possible_at(
    evidence: Evidence, arm: str, event: int, seen: CastSeen | ProductSeen
) -> Iterator[Verdict]:
    """What could be wrong with a cast, or with a product in FP8."""
    if isinstance(seen, CastSeen):
        at = address_of(At(what="codes"), event, seen.at)
        yield Verdict("O2", arm, "operand", "diverged", at=at, expect=Is(bits(0)))
        return
    at = address_of(At(what="product", name=seen.role), event, seen.at)
    narrow = seen.a.codes is not None
    formats = tuple(sorted({seen.a.format, seen.b.format})) if narrow else ()
    yield Verdict("O20", arm, seen.role, "diverged", at=at, expect=Formats(formats))
    if seen.at.phase == "recompute" and not evidence.spec.reentrant:
        first = msgspec.structs.replace(at, event=-1, phase="forward")
        yield Verdict("O13", arm, "output", "diverged", at=at, expect=Same(first))
    if narrow:
        made = [
            address_of(At(what="cast"), moment.event, cast.at)
            for moment in evidence.traces[arm].moments[: event + 1]
            for cast in moment.casts
        ]
        operand = msgspec.structs.replace(at, what="scale", side="b")
        expect = MadeBy(tuple(dict.fromkeys(made)))
        yield Verdict("O3", arm, seen.role, "diverged", at=operand, expect=expect)


@pytest.mark.heavy
def test_triage_confirms_in_a_fresh_process_and_tells_the_story(
    tmp_path: Path, scripts: RunScript
) -> None:
    tried, case = judge(), case_of(LARGE)
    with find_plant(FAULTS, "no_commit").plant():
        verdict = cause_of(tried.judge(case), "O14")
        result = triage(tried, case, verdict, plant=(FAULTS, "no_commit"))
    assert result.confirmed and result.finding.flake == "always"
    # what a state costs no product has told yet
    assert result.finding.severity == "medium" and result.finding.reach == "gaussian"
    assert Store(tmp_path).add(result.finding, result.script) == "new"
    check_folder(tmp_path, result.finding.id)
    clean = scripts(tmp_path / "findings" / result.finding.id / "repro.py")
    assert clean.code == 0, clean.output


def check_folder(out: Path, id: str) -> Finding:
    """What a stateful finding's folder holds."""
    folder = out / "findings" / id
    finding = load_finding(folder)
    assert finding.story is not None
    assert finding.story.slot.endswith("backward slot 0")
    assert all(line in report(finding, "") for line in finding.story.lines)
    assert f"event {finding.story.event}" in finding.sentence
    assert all(states[-1].event >= finding.story.event for states in finding.story.states.values())
    assert ElementTree.parse(folder / "state.svg").getroot().tag.endswith("svg")
    return finding


@cache
def _folder_of(version: str) -> str:
    """Makes the version available, or skips."""
    try:
        return str(ensure(version))
    except ValueError as missing:
        pytest.skip(str(missing))


def run_with(version: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptRun:
    _folder_of(version)
    monkeypatch.setenv(VERSION_VARIABLE, version)
    return run_script(path)


@pytest.mark.heavy
def test_the_backward_state_that_reentrant_checkpoints_never_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TransformerEngine 1.10.0; repaired in 1.12.0."""
    on_transformer_engine("schedule_triage_te.py", tmp_path, version="1.10.0")
    (finding,) = Store(tmp_path).findings()
    check_folder(tmp_path, finding.id)
    assert finding.story is not None and len(finding.story.states) == 2
    spec = finding.minimal.spec
    assert (spec.layer, spec.layers) == ("linear", 1)
    assert spec.region in ("each", "whole") and spec.reentrant
    assert sum(isinstance(event, Forward) for event in spec.events) <= 2
    assert sum(isinstance(event, Step) for event in spec.events) <= 2
    script = tmp_path / "findings" / finding.id / "repro.py"
    assert len(script.read_text().splitlines()) <= MAX_TE_LINES
    # a finding is new only if its script showed it in a fresh process, under 1.10.0
    assert "expected" in finding.script_output
    gone = run_with("1.12.0", script, monkeypatch)
    assert gone.code == 0, gone.output


def test_the_minimiser_ends_where_no_neighbour_shows() -> None:
    """A synthetic divergence: a checkpointed second training forward after a step."""

    def shows(case: Case) -> bool:
        events = case.spec.events
        steps = [i for i, event in enumerate(events) if isinstance(event, Step)]
        later = events[steps[0] :] if steps else ()
        trains = any(isinstance(e, Forward) and e.mode == "train" for e in later)
        return trains and case.spec.checkpoint != "none"

    case = case_of(LARGE)
    small, again = minimise(case, shows), minimise(case, shows)
    assert small == again and not small.untried
    spec = small.case.spec
    kinds = [type(event) for event in spec.events]
    assert kinds == [Forward, Backward, Step, Forward]
    assert spec == Spec(
        recipe=LARGE.recipe, model="library_linear", m=16, k=16, events=spec.events,
        checkpoint="full", wraps=spec.wraps,
    )  # fmt: skip
    assert small.case.data == case.data


def test_a_schedule_that_never_shows_again_is_left_as_it_is() -> None:
    case = case_of(LARGE)
    assert minimise(case, lambda candidate: False).case == case


@pytest.mark.parametrize(
    ("values", "reach"),
    [("gaussian", "gaussian"), ("zero", "zero_rows"), ("spike", "outlier"), ("inf", "inf_nan")],
)
def test_reach_is_the_wildest_stimulus(values: str, reach: str) -> None:
    forward = msgspec.structs.replace(Forward(), values=values)
    assert reach_of(plain(forward, Forward())) == reach


def test_only_the_rules_that_explain_are_needed() -> None:
    spec = Spec(recipe="reference.delayed", model="library_linear")
    names = [rule.name for rule in needed("O14", spec)]
    assert "O14" in names and "contract" in names and "R20" not in names
