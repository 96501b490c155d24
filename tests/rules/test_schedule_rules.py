"""O14 on hand-made traces: each as-built deviation is followed where the ledger has it, is a
divergence where it does not, and explains nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Settings,
    Switch,
)
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.ledger.ledger import STATE_DEVIATIONS
from narrowfuzz.numerics.delayed import Policy, Slot, fresh, resized
from narrowfuzz.numerics.formats import F32
from narrowfuzz.rules.evidence import Evidence, OwnLayers
from narrowfuzz.rules.library.contract import check_contract
from narrowfuzz.rules.library.equal_runs import check_reload
from narrowfuzz.rules.state.library import Library
from narrowfuzz.rules.state.machine import check_machine
from narrowfuzz.rules.state.outcome import outcome
from narrowfuzz.rules.state.plan import Resize
from narrowfuzz.trace.address import Phase
from narrowfuzz.trace.snapshots import (
    CallSeen,
    CastSeen,
    ExecutionPoint,
    Moment,
    SlotName,
)
from narrowfuzz.trace.trace import RunError, Trace

INPUT, GRADIENT = SlotName("0", "forward", 0), SlotName("0", "backward", 0)
IDLE = SlotName("1", "forward", 0)
State = Mapping[SlotName, Slot]
FRESH = fresh(4)


def policy(settings: Settings) -> Policy:
    return Policy(
        settings.history,
        "max" if settings.algorithm == "callable" else settings.algorithm,
        settings.margin,
        "e4m3",
        "e5m2",
        rolls_on_zero=not settings.fused,
        backward_commits="first",
    )


def slot(scale: float, *window: float) -> Slot:
    return Slot(np.float32(scale), np.array(window, np.float32))


def cast(name: SlotName, amax: float, scale: float = 1.0) -> CastSeen:
    phase: Phase = "forward" if name.direction == "forward" else "backward"
    at = ExecutionPoint(phase, 0, 0) if phase == "forward" else ExecutionPoint(phase)
    codes = np.zeros((1, 1), np.uint8)
    return CastSeen(at, name, "e4m3", np.float32(scale), np.float32(amax), codes)


def moment(event: int, state: State, *casts: CastSeen) -> Moment:
    calls = tuple(CallSeen(c.at, c.slot.layer) for c in casts if c.slot and c.at.call >= 0)
    return Moment(event, calls, casts, (), state, {})


def case_of(events: tuple[Event, ...], recipe: str = "te.delayed", **fields: object) -> Case:
    spec = Spec(recipe=recipe, model="library_linear", events=events, **fields)  # type: ignore[arg-type]
    return Case(spec=spec, data=DataSpec())


def traced(*moments: Moment, **outputs: F32) -> Trace:
    return Trace("eager", outputs, moments=moments)


def evidence_of(case: Case, trace: Trace, *deviations: str, other: Trace | None = None) -> Evidence:
    """Of one eager run; ``other`` is what every further run leaves."""
    return Evidence(
        case=case,
        traces={"eager": trace},
        deviations={name: name for name in deviations},
        library=OwnLayers(
            "delayed",
            policy,
            resizing=frozenset({"quantization"}),
            run=(lambda spec: other) if other else None,
        ),
    )


def symptoms(
    events: tuple[Event, ...],
    moments: list[tuple[State, tuple[CastSeen, ...]]],
    *deviations: str,
    **fields: object,
) -> list[str]:
    """What O14 says of a library that left these states; ``known: <deviation>`` where explained."""
    trace = traced(*(moment(i, state, *casts) for i, (state, casts) in enumerate(moments)))
    evidence = evidence_of(case_of(events, **fields), trace, *deviations)
    verdicts = check_machine(evidence)
    found = [f"known: {v.explained_by}" if v.status == "known" else v.symptom for v in verdicts]
    return [text for text in found if text]


STEP = (Open(), Forward(), Close())
CASTS = {INPUT: slot(1, 2, 0, 0, 0)}
DONE = {INPUT: slot(224, 0, 0, 0, 2)}


def test_a_library_that_keeps_the_rules_is_silent() -> None:
    moments = [({}, ()), (CASTS, (cast(INPUT, 2),)), (DONE, ())]
    assert symptoms(STEP, moments) == []
    assert symptoms(STEP, moments, *STATE_DEVIATIONS) == []


def known(
    deviation: str,
    symptom: str,
    events: tuple[Event, ...],
    moments: list[tuple[State, tuple[CastSeen, ...]]],
    **fields: object,
) -> None:
    """Diverges without the deviation, is explained by it, and by no other."""
    found = symptoms(events, moments, **fields)
    assert found == [symptom], found
    others = [name for name in STATE_DEVIATIONS if name != deviation]
    assert symptom in symptoms(events, moments, *others, **fields)
    assert symptoms(events, moments, deviation, **fields) == [f"known: {deviation}"]


def test_a_region_inside_a_disabled_one() -> None:
    events = (Open(enabled=False), Open(), Forward(), Close(), Close())
    state = [({}, ()), ({}, ()), (CASTS, (cast(INPUT, 2),)), (CASTS, ()), (CASTS, ())]
    known("disabled_region_keeps", "forward scale not updated", events, state)


def test_an_update_of_what_did_not_run() -> None:
    events = (Open(), Forward(path=1), Close(), *STEP)
    first = {IDLE: slot(112, 0, 0, 0, 4)}
    rolled = {IDLE: slot(112, 0, 0, 4, 0)}
    state: list[tuple[State, tuple[CastSeen, ...]]] = [
        ({}, ()),
        ({IDLE: slot(1, 4, 0, 0, 0)}, (cast(IDLE, 4),)),
        (first, ()),
        (first, ()),
        ({**first, **CASTS}, (cast(INPUT, 2),)),
        ({**rolled, **DONE}, ()),
    ]
    known(
        "idle_windows_roll",
        "forward state moved without a commit by a close, unfused",
        events,
        state,
        layout="branch",
        settings=Settings(fused=False),
    )


def test_the_owner_of_the_update_reaches_no_loss() -> None:
    events = (*STEP, Backward(of=(0,)))
    staged = {**DONE, GRADIENT: slot(1, 4, 0, 0, 0)}
    state: list[tuple[State, tuple[CastSeen, ...]]] = [
        ({}, ()),
        (CASTS, (cast(INPUT, 2),)),
        (DONE, ()),
        (staged, (cast(GRADIENT, 4),)),
    ]
    known(
        "first_layer_owns_update",
        "backward scale not updated, unused layer",
        events,
        state,
        layout="dangling",
    )


def test_deviations_that_cancel_are_not_followed() -> None:
    """An inner region has the second of two forwards update, too; the owner reaches no loss."""
    events = (
        Open(), Open(), Forward(), Close(), Forward(), Close(), Backward(of=(1,)),
    )  # fmt: skip
    staged = {GRADIENT: slot(1, 4, 0, 0, 0)}
    state: list[tuple[State, tuple[CastSeen, ...]]] = [({}, ())] * 6 + [
        (staged, (cast(GRADIENT, 4),))
    ]
    both = ("inner_region_owns_update", "first_layer_owns_update")
    assert symptoms(events, state, layout="dangling") == []
    assert symptoms(events, state, both[0], layout="dangling") == [
        "backward scale not updated, unused layer", f"known: {both[0]}",
    ]  # fmt: skip
    assert symptoms(events, state, *both, layout="dangling") == []


def test_another_margin() -> None:
    events = (*STEP, Switch(margin=1), *STEP)
    again = {INPUT: slot(224, 2, 0, 0, 2)}
    state: list[tuple[State, tuple[CastSeen, ...]]] = [
        ({}, ()),
        (CASTS, (cast(INPUT, 2),)),
        (DONE, ()),
        (DONE, ()),
        (DONE, ()),
        (again, (cast(INPUT, 2, 224),)),
        ({INPUT: slot(224, 0, 0, 2, 2)}, ()),
    ]
    known("margin_of_first_forward", "forward scale", events, state)


def test_an_evaluation_leaves_its_maximum() -> None:
    events = (Open(), Forward(mode="no_grad"))
    state = [({}, ()), (CASTS, (cast(INPUT, 2),))]
    known("evaluation_stages", "forward staged maximum", events, state)


def test_a_save_after_a_forward_in_high_precision() -> None:
    events = (*STEP, Forward(mode="eval"), Reload(), Open())
    call = Moment(3, (CallSeen(ExecutionPoint("forward", 1, 0), "0"),), (), (), DONE, {})
    moments = [
        moment(0, {}),
        moment(1, CASTS, cast(INPUT, 2)),
        moment(2, DONE),
        call,
        moment(4, {INPUT: FRESH}),
    ]
    for deviation, want in (
        ("", "forward state changed by a reload"),
        ("saved_after_fp8_only", "known: saved_after_fp8_only"),
    ):
        evidence = evidence_of(case_of(events), traced(*moments), *filter(None, [deviation]))
        told = [v.symptom or f"known: {v.explained_by}" for v in check_machine(evidence)]
        assert told == [want]


def test_a_loaded_layer_that_has_not_run_waits() -> None:
    """A gradient was staged after its region's update; the next comes while the layer is idle."""
    events = (
        Open(), Forward(), Forward(), Backward(of=(0,)), Backward(of=(1,)), Close(), Reload(),
        Open(), Forward(path=1), Backward(of=(2,)),
    )  # fmt: skip
    staged = DONE | {GRADIENT: slot(14336, 2, 0, 0, 4)}
    later = staged | {IDLE: slot(1, 4, 0, 0, 0)}
    moments = [
        ({}, ()), (CASTS, (cast(INPUT, 2),)), (CASTS, ()),
        (CASTS | {GRADIENT: slot(14336, 0, 0, 0, 4)}, (cast(GRADIENT, 4),)),
        (CASTS | {GRADIENT: slot(14336, 2, 0, 0, 4)}, (cast(GRADIENT, 2, 14336),)),
        (staged, ()), (staged, ()), (staged, ()), (later, (cast(IDLE, 4),)), (later, ()),
    ]  # fmt: skip
    known("loaded_layers_wait", "backward scale not updated", events, moments)
    moments[-1] = (later | {GRADIENT: slot(14336, 0, 0, 4, 2)}, ())
    assert symptoms(events, moments) == []


def failure(where: str, events: tuple[Event, ...], **fields: object) -> str:
    """What contract calls an error in the last event."""
    error = RunError("forward", "RuntimeError", "", where, len(events) - 1)
    evidence = evidence_of(case_of(events, **fields), Trace("eager", error=error))
    return next(check_contract(evidence)).symptom


def test_failures_are_told_apart() -> None:
    switched, state, other = (*STEP, Switch(history=2), *STEP), "quantization.update", "linear.run"
    assert failure(state, switched).endswith("after a switch of the history")
    assert failure(state, (*STEP, Switch(history=4), *STEP)) == f"RuntimeError in {state}"
    assert failure(other, switched) == f"RuntimeError in {other}"
    outside = failure(other, (Forward(),), quantized_init=True)
    assert outside.endswith("quantised parameters outside regions")
    assert failure(other, STEP[:2], quantized_init=True) == f"RuntimeError in {other}"


def test_a_reload_is_not_blamed_for_what_the_run_without_it_shows() -> None:
    events = (Open(), Forward(path=1), Close(), Reload(), Open(), Close())
    first = {IDLE: slot(112, 0, 0, 0, 4)}
    staged = moment(1, {IDLE: slot(1, 4, 0, 0, 0)}, cast(IDLE, 4))
    before = (moment(0, {}), staged, moment(2, first))
    rolled = moment(5, {IDLE: slot(112, 0, 0, 4, 0)})
    without = traced(*before, moment(3, first), moment(4, first), rolled)
    ran = replace(moment(5, first), calls=(CallSeen(ExecutionPoint("forward", 1, 0), IDLE.layer),))
    loaded = traced(*before, moment(3, first), moment(4, first), ran)
    case = case_of(events, layout="branch", settings=Settings(fused=False))
    for deviations, want in (((), "inconclusive"), (("idle_windows_roll",), "known")):
        evidence = evidence_of(case, loaded, *deviations, other=without)
        assert [v.status for v in check_reload(evidence)] == [want]
        assert evidence.library is not None
        by_chance = replace(evidence.library, gradient_rounding="stochastic")
        verdicts = list(check_reload(replace(evidence, library=by_chance)))
        assert [v.status for v in verdicts] == ["not_applicable"]


def test_a_followed_deviation_excuses_nothing_else_of_a_reload() -> None:
    """Neither a state that the machine cannot account for, nor results of equal scales."""
    events = (Open(), Forward(), Close(), Open(), Close(), Reload(), Open(), Forward(), Close())
    rolled = {INPUT: slot(224, 0, 0, 2, 0)}
    late = (rolled | {INPUT: slot(224, 4, 0, 2, 0)}, {INPUT: slot(112, 0, 2, 0, 4)})
    before = [
        moment(0, {}), moment(1, CASTS, cast(INPUT, 2)), moment(2, DONE), moment(3, DONE),
        moment(4, rolled),
    ]  # fmt: skip
    after = [moment(6, rolled), moment(7, late[0], cast(INPUT, 4, 224)), moment(8, late[1])]
    wrong = [*after[:2], moment(8, {INPUT: slot(7, 0, 2, 0, 4)})]
    one, two = np.float32([[1]]), np.float32([[2]])
    case = case_of(events, settings=Settings(fused=False))
    plain = traced(*before, moment(5, rolled), *after, y0=one)
    for moments, output, want in ((after, one, "ok"), (wrong, one, "diverged"),
                                   (after, two, "diverged")):  # fmt: skip
        reloaded = traced(*before, moment(5, rolled), *moments, y0=output)
        evidence = evidence_of(case, reloaded, "idle_windows_roll", other=plain)
        assert "known" in [v.status for v in check_machine(evidence)]
        assert [v.status for v in check_reload(evidence)] == [want]


@pytest.mark.parametrize("kind", ["current", "mx"])
def test_a_recipe_that_measures_each_tensor_anew_keeps_no_state(
    kind: Literal["current", "mx"],
) -> None:
    for state, want in (({}, "ok"), ({INPUT: FRESH}, "forward state kept")):
        trace = traced(*(moment(i, state) for i in range(3)))
        evidence = replace(
            evidence_of(case_of(STEP, "te.current"), trace),
            library=OwnLayers(kind, lambda settings: None),
        )
        (verdict,) = check_machine(evidence)
        assert (verdict.symptom or verdict.status) == want


def test_an_inner_region_gives_the_update_away_twice() -> None:
    inner = Library().entered(Settings()).entered(Settings()).trained(0).left()
    library = inner.trained(1).trained(2).left()
    deviation = frozenset({"inner_region_owns_update"})
    assert set(library.owners) == {0, 1}
    assert library.updates((1,), False, deviation)
    assert not library.updates((2,), False, deviation)
    assert library.updates((2,), True, frozenset())


def test_the_algorithm_of_the_region_entered_last() -> None:
    deviation = frozenset({"algorithm_of_last_region"})
    first, other = Settings(), Settings(algorithm="most_recent")
    library = Library().entered(first).quantised("0", first)
    assert library.settings("0", first, deviation) == first
    library = library.entered(Settings(algorithm="most_recent", margin=2))  # another text
    assert library.settings("0", first, deviation) == first
    library = library.entered(other)
    assert library.settings("0", first, deviation) == other
    assert library.settings("0", first, frozenset()) == first


@pytest.mark.parametrize(
    ("history", "rule", "as_built"),
    [
        (3, (9, 2, 3), (9, 1, 2)),
        (6, (9, 0, 0, 1, 2, 3), (9, 1, 2, 3, 0, 0)),
        (1, (9,), (9,)),
        (4, (9, 1, 2, 3), (9, 1, 2, 3)),
    ],
)
def test_another_history(
    history: int, rule: tuple[float, ...], as_built: tuple[float, ...]
) -> None:
    before = slot(5, 9, 1, 2, 3)
    built = outcome(before, [Resize(history, cut=True)])
    assert resized(before, history).equals(slot(5, *rule))
    assert built.slot.equals(slot(5, *as_built))
    assert built.done == (Resize(history, cut=rule != as_built),)
    assert outcome(before, [Resize(history, cut=False)]).slot.equals(slot(5, *rule))
