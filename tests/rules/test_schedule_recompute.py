"""What the rules of schedules make of recomputes, on hand-made traces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.event_records import see_cast
from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Settings,
    Step,
)
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.ledger.ledger import STATE_DEVIATIONS
from narrowfuzz.numerics.delayed import Policy, Slot
from narrowfuzz.play.library import Cast
from narrowfuzz.rules.evidence import Evidence, OwnLayers
from narrowfuzz.rules.library.contract import check_balance
from narrowfuzz.rules.library.recompute import check_recompute
from narrowfuzz.rules.state.machine import check_machine
from narrowfuzz.rules.state.symptoms import circumstances, unfinished
from narrowfuzz.trace.snapshots import (
    CallSeen,
    CastSeen,
    ExecutionPoint,
    Moment,
    ProductSeen,
    Side,
    SlotName,
)
from narrowfuzz.trace.trace import Trace

INPUT, GRADIENT = SlotName("0", "forward", 0), SlotName("0", "backward", 0)
CHECKPOINT, REENTRANT = "eager+checkpoint", "eager+checkpoint_reentrant"
STEP = (Open(), Forward(), Close())
State = dict[SlotName, Slot]


def policy(settings: Settings) -> Policy:
    return Policy(
        4, "max", 0, "e4m3", "e5m2", rolls_on_zero=not settings.fused, backward_commits="first"
    )


def slot(scale: float, *window: float) -> Slot:
    return Slot(np.float32(scale), np.array(window, np.float32))


def cast(name: SlotName, amax: float, scale: float = 1.0, forward: int = 0) -> CastSeen:
    narrow = name.direction == "forward"
    at = ExecutionPoint("forward", forward, 0) if narrow else ExecutionPoint("backward")
    codes = np.zeros((1, 1), np.uint8)
    return CastSeen(at, name, "e4m3", np.float32(scale), np.float32(amax), codes)


def again(*forwards: int) -> tuple[CallSeen, ...]:
    return tuple(CallSeen(ExecutionPoint("recompute", forward, 0), "0") for forward in forwards)


def moment(event: int, state: State, *casts: CastSeen, calls: Iterable[CallSeen] = ()) -> Moment:
    first = tuple(CallSeen(c.at, "0") for c in casts if c.at.call >= 0)
    return Moment(event, (*first, *calls), casts, (), state, {})


def library(events: tuple[Event, ...], **fields: Any) -> Spec:
    return Spec(recipe="te.delayed", model="library_linear", events=events, **fields)


def evidence(
    events: tuple[Event, ...], moments: list[Moment], arm: str, *deviations: str, **fields: Any
) -> Evidence:
    kind = "reentrant" if arm == REENTRANT else "full"
    spec = library(events, **{"checkpoint": kind, "wraps": "each"} | fields)
    return Evidence(
        case=Case(spec=spec, data=DataSpec()),
        library=OwnLayers("delayed", policy),
        traces={arm: Trace(arm, moments=tuple(moments))},
        deviations={name: name for name in deviations},
    )


def known(
    deviation: str,
    symptoms: set[str],
    events: tuple[Event, ...],
    moments: list[Moment],
    arm: str,
    **fields: Any,
) -> None:
    """Diverges without the deviation, is explained by it, and by none of the others."""

    def told(*deviations: str) -> set[str]:
        verdicts = check_machine(evidence(events, moments, arm, *deviations, **fields))
        return {v.symptom or f"known: {v.explained_by}" for v in verdicts}

    assert told() == symptoms
    others = [name for name in STATE_DEVIATIONS if name != deviation]
    assert symptoms & told(*others)
    assert told(deviation) == {f"known: {deviation}"}


CASTS, DONE = {INPUT: slot(1, 2, 0, 0, 0)}, {INPUT: slot(224, 0, 0, 0, 2)}
FORWARD = [moment(0, {}), moment(1, CASTS, cast(INPUT, 2)), moment(2, DONE)]


def test_a_recompute_in_a_region_of_its_own_updates_again() -> None:
    rolled = {INPUT: slot(224, 0, 0, 2, 0)}
    # the tensor by tensor update needs the deviation of idle windows, too
    events = (*STEP, Backward(of=(0,)))
    moments = [*FORWARD, moment(3, rolled, calls=again(0))]
    both = ("recompute_updates_forward", "idle_windows_roll")
    run = evidence(events, moments, CHECKPOINT, *both, settings=Settings(fused=False))
    assert {v.explained_by for v in check_machine(run)} == set(both)
    run = evidence(events, moments, CHECKPOINT, settings=Settings(fused=False))
    assert [v.symptom for v in check_machine(run)] == [
        "forward state moved without a commit by a backward, unfused"
    ]


def test_each_recomputed_layer_updates_gradients() -> None:
    """One layer used twice under a reentrant checkpoint: two updates in one backward."""
    made = {GRADIENT: slot(14336, 0, 0, 4, 2)}
    casts = [cast(GRADIENT, 4), cast(GRADIENT, 2, 14336)]
    known(
        "segments_update_gradients",
        {
            "backward cast with another scale than its slot's",
            "backward window",
        },
        (*STEP, Backward(of=(0,))),
        [*FORWARD, moment(3, {**DONE, **made}, *casts, calls=again(0, 0))],
        REENTRANT,
        layout="twice",
    )


def test_a_recompute_lets_the_next_forward_of_its_region_update() -> None:
    events = (Open(), Forward(), Backward(of=(0,)), Forward(), Backward(of=(1,)))
    first, second = {GRADIENT: slot(14336, 0, 0, 0, 4)}, {GRADIENT: slot(14336, 0, 0, 4, 2)}
    twice = {INPUT: slot(1, 3, 0, 0, 0)}
    moments = [
        moment(0, {}),
        moment(1, CASTS, cast(INPUT, 2)),
        moment(2, {**CASTS, **first}, cast(GRADIENT, 4), calls=again(0)),
        moment(3, {**twice, **first}, cast(INPUT, 3, forward=1)),
        moment(4, {**twice, **second}, cast(GRADIENT, 2, 14336), calls=again(1)),
    ]
    known(
        "recompute_leaves_ownership",
        {"backward window"},
        events,
        moments,
        CHECKPOINT,
    )


def test_an_inner_region_recomputed_on_its_own_updates_again() -> None:
    """What an evaluation has staged since is taken in."""
    staged, taken = {INPUT: slot(224, 1, 0, 0, 2)}, {INPUT: slot(224, 0, 0, 2, 1)}
    inner, look = Forward(inside=True), Forward(mode="eval", inside=True)
    events = (Open(), inner, Close(), look, Backward(of=(0,)))
    moments = [
        *FORWARD,
        moment(3, staged, cast(INPUT, 1, 224, forward=1)),
        moment(4, taken, calls=again(0)),
    ]
    both = ("inner_recompute_updates_forward", "evaluation_stages")
    run = evidence(events, moments, CHECKPOINT, *both)
    assert {v.explained_by for v in check_machine(run)} == set(both)
    run = evidence(events, moments, CHECKPOINT, "evaluation_stages")
    symptoms = {v.symptom for v in check_machine(run)}
    assert "forward state moved without a commit by a backward, several regions" in symptoms


def test_writing_parameters_updates_again() -> None:
    """A step inside the region takes what was staged; or does not, which is as good."""
    events = (Open(), Forward(), Backward(of=(0,)), Step())
    moments = [moment(0, {}), moment(1, CASTS, cast(INPUT, 2)), moment(2, CASTS), moment(3, DONE)]
    known(
        "writing_parameters_updates_forward",
        {"forward state changed by a step"},
        events,
        moments,
        "eager",
        quantized_init=True,
    )
    run = evidence(events, [*moments[:3], moment(3, CASTS)], "eager", quantized_init=True)
    assert [v.status for v in check_machine(run)] == ["ok"]


def test_a_region_opened_in_a_reentrant_checkpoint() -> None:
    known(
        "checkpointed_region_keeps",
        {"forward scale not updated"},
        (Forward(inside=True),),
        [moment(0, CASTS, cast(INPUT, 2))],
        REENTRANT,
    )


def test_circumstances_of_recomputes() -> None:
    def told(*events: Event, arm: str = CHECKPOINT, **fields: Any) -> str:
        return circumstances(
            library(events, **{"checkpoint": "full", "wraps": "each"} | fields), arm
        )

    plain = (*STEP, Backward(of=(0,)))
    assert told(*plain) == ""
    assert told(*plain, wraps="nested") == ", nested"
    assert told(*STEP, Forward(mode="eval"), Backward(of=(0,))) == ", another precision in between"
    assert told(*STEP, Forward(mode="eval"), Backward(of=(0,)), arm="eager") == ""
    inside = (Forward(), Open(), Backward(of=(0,)))
    assert told(*inside) == ", high precision recomputed in a region"
    assert unfinished(library(plain)) == ""
    assert unfinished(library(STEP)) == ", some forward unused"


def test_what_is_left_over_names_an_unused_forward() -> None:
    events = (*STEP, *STEP, Backward(of=(1,)), Step())
    moments = [Moment(i, (), (), (), {}, {"stashed scales": int(i > 3)}) for i in range(8)]
    (verdict,) = check_balance(evidence(events, moments, CHECKPOINT))
    assert verdict.symptom == "left over: stashed scales, some forward unused"


def multiplied(event: int, at: ExecutionPoint, a: float, b: float) -> Moment:
    """A call whose product has these inverse scales."""
    codes = np.zeros((1, 1), np.uint8)
    sides = [Side("e4m3", codes, np.float32(inverse)) for inverse in (a, b)]
    return Moment(event, (CallSeen(at, "0"),), (), (ProductSeen(at, "output", *sides),), {}, {})


@pytest.mark.parametrize(
    ("scale", "symptom"),
    [
        (1, "recomputed with the scales of another call"),
        (7, "recomputed with another scale"),
        (2, ""),
    ],
)
def test_whose_scales_a_recompute_takes(scale: float, symptom: str) -> None:
    events = (Forward(), Forward(), Backward(of=(1,)))
    moments = [
        multiplied(0, ExecutionPoint("forward", 0, 0), 1, 1),
        multiplied(1, ExecutionPoint("forward", 1, 0), 2, 2),
        multiplied(2, ExecutionPoint("recompute", 1, 0), scale, scale),
    ]
    (verdict,) = check_recompute(evidence(events, moments, CHECKPOINT))
    assert verdict.symptom == symptom


@pytest.mark.parametrize(
    ("weight", "scale", "symptom"),
    [
        (5, 1, "recomputed with the scales of another call"),
        (5, 7, "recomputed with another scale"),
        (7, 1, "recomputed with another scale"),
        (5, 2, ""),
    ],
)
def test_whose_scales_a_recompute_with_a_kept_weight_takes(
    weight: float, scale: float, symptom: str
) -> None:
    """y1 keeps a weight cast with 1/scale 5 for y2, whose recompute may take y0's for its input."""
    events = (Forward(), Forward(first=True), Forward(first=False), Backward(of=(2,)))
    moments = [
        multiplied(0, ExecutionPoint("forward", 0, 0), 3, 1),
        multiplied(1, ExecutionPoint("forward", 1, 0), 5, 4),
        multiplied(2, ExecutionPoint("forward", 2, 0), 5, 2),
        multiplied(3, ExecutionPoint("recompute", 2, 0), weight, scale),
    ]
    (verdict,) = check_recompute(evidence(events, moments, CHECKPOINT))
    assert verdict.symptom == symptom


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_nan_is_a_nan_whatever_its_sign(fmt: str) -> None:
    """Hardware writes all NaNs as 0x7F; torch's cast keeps the sign."""
    x = torch.tensor([-float("nan"), float("nan"), 1.0, -2.0])
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt]
    codes = x.to(dtype).view(torch.uint8).masked_fill(x.isnan(), 0x7F)
    raw = Cast(None, x, codes, torch.tensor([1.0]), fmt)
    assert see_cast(raw, ExecutionPoint("forward")).wrong is None
    wrong = codes.clone()
    wrong[2] = 0x7F
    raw = Cast(None, x, wrong, torch.tensor([1.0]), fmt)
    assert see_cast(raw, ExecutionPoint("forward")).wrong is not None
