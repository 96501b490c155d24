"""Perturbations of each kind of observation that rules of schedules read. A rule that notices none
of them is vacuous."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.power.falsify import GAIN, NUMBERS, Numbers
from narrowfuzz.power.perturbation import Perturbation
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import Reads
from narrowfuzz.trace.snapshots import (
    Moment,
    ProductSeen,
    Side,
    SlotName,
    Wrong,
)
from narrowfuzz.trace.trace import RunError, Trace

Falsified = Callable[[Trace], Trace | None]
State = Mapping[SlotName, Slot]


def _of_trace(name: str, of: str, falsified: Falsified) -> Perturbation:
    def change(evidence: Evidence, arm: str) -> Evidence | None:
        own = evidence.in_one_process
        trace = falsified(own[arm]) if arm in own else None
        if trace is None:
            return None
        return replace(evidence, traces={**evidence.traces, arm: trace})

    return Perturbation(name, of, change)


def _of_last_rank(name: str, of: str, falsified: Falsified) -> Perturbation:
    def change(evidence: Evidence, arm: str) -> Evidence | None:
        *others, last = evidence.on_ranks[arm].ranks or (None,)
        trace = None if last is None else falsified(last)
        if trace is None:
            return None
        ranks = replace(evidence.on_ranks[arm], ranks=(*others, trace))
        return replace(evidence, traces={**evidence.traces, arm: ranks})

    return Perturbation(name, of, change)


def _after_others(name: str, of: str, falsified: Falsified) -> Perturbation:
    def change(evidence: Evidence, arm: str) -> Evidence | None:
        after_others = evidence.own_layers.after_others
        if after_others is None:
            return None
        trace = falsified(after_others())
        if trace is None:
            return None
        return replace(evidence, library=replace(evidence.own_layers, after_others=lambda: trace))

    return Perturbation(name, of, change)


def _outputs(numbers: Numbers, trace: Trace) -> Trace | None:
    if not trace.outputs:
        return None
    return replace(trace, outputs={n: numbers.change(x) for n, x in trace.outputs.items()})


def _state(change: Callable[[State, State], State], trace: Trace) -> Trace | None:
    """Replace each event's state by ``change(state before the event, state after it)``."""
    if not any(moment.state for moment in trace.moments):
        return None
    moments: list[Moment] = []
    before: State = {}
    for moment in trace.moments:
        moments.append(replace(moment, state=change(before, moment.state)))
        before = moment.state
    return replace(trace, moments=tuple(moments))


def _gained(before: State, now: State) -> State:
    return {n: replace(slot, scale=np.float32(slot.scale * GAIN)) for n, slot in now.items()}


def _emptied(before: State, now: State) -> State:
    return {n: replace(slot, window=np.zeros_like(slot.window)) for n, slot in now.items()}


def _stale(before: State, now: State) -> State:
    """The state of another step: the one before the event."""
    return {n: before.get(n, slot) for n, slot in now.items()}


def _kept(trace: Trace) -> Trace | None:
    """Add state to a trace that has none."""
    if any(moment.state for moment in trace.moments):
        return None
    slot = {SlotName("0", "forward", 0): Slot(np.float32(1.0), np.zeros(1, np.float32))}
    return _moments(trace, lambda m: replace(m, state=slot))


def _shifted(before: State, now: State) -> State:
    """The state of another tensor: each slot gets that of its neighbour."""
    names = sorted(now)
    return dict(zip(names, (now[n] for n in names[1:] + names[:1]), strict=True))


def _sides(change: Callable[[Side], Side], phases: tuple[str, ...], trace: Trace) -> Trace | None:
    """Falsify the operands of the products in these phases."""

    def changed(product: ProductSeen) -> ProductSeen:
        if product.at.phase not in phases:
            return product
        return replace(product, a=change(product.a), b=change(product.b))

    if not any(p.at.phase in phases for moment in trace.moments for p in moment.products):
        return None
    return _moments(trace, lambda m: replace(m, products=tuple(map(changed, m.products))))


def _moments(trace: Trace, change: Callable[[Moment], Moment]) -> Trace:
    return replace(trace, moments=tuple(change(moment) for moment in trace.moments))


def _stale_inverse(side: Side) -> Side:
    if side.scale_inv is None:
        return side
    return replace(side, scale_inv=np.float32(side.scale_inv * np.float32(0.5)))


def _codes(change: Callable[[Any], Any], side: Side) -> Side:
    return side if side.codes is None else replace(side, codes=change(side.codes))


def _up(codes: Any) -> Any:
    return (codes + 1).astype(np.uint8)


def _swapped(codes: Any) -> Any:
    return np.roll(codes, 1, axis=0)


def _other_format(side: Side) -> Side:
    return replace(side, format="e5m2" if side.format == "e4m3" else "e4m3")


def _other_precision(side: Side) -> Side:
    return replace(side, format="bf16" if side.codes is not None else "e4m3")


def _inexact(trace: Trace) -> Trace | None:
    """Mark every cast that agreed with its definition as wrong in one bit."""
    if all(cast.wrong for moment in trace.moments for cast in moment.casts):
        return None
    bit = Wrong("codes", (0, 0), 1.0, 2.0)
    return _moments(
        trace, lambda m: replace(m, casts=tuple(replace(c, wrong=c.wrong or bit) for c in m.casts))
    )


def _raised(trace: Trace) -> Trace | None:
    if trace.error is not None:
        return None
    error = RunError("forward", "RuntimeError", "", "elsewhere.f", len(trace.moments) - 1)
    return Trace(trace.arm, error=error)


def _left_over(trace: Trace) -> Trace | None:
    return _moments(trace, lambda m: replace(m, pending={**m.pending, "stashed scales": 1}))


_ALL = ("forward", "recompute", "backward")
_CODES = (
    ("zeros", partial(_codes, np.zeros_like)),
    ("one code up", partial(_codes, _up)),
    ("swapped rows", partial(_codes, _swapped)),
)


def _operands(phases: tuple[str, ...]) -> tuple[Perturbation, ...]:
    changes = (("stale scale", _stale_inverse), *_CODES)
    return tuple(
        _of_trace(name, "operands", partial(_sides, change, phases)) for name, change in changes
    )


_STATES = (
    ("gain 1.01", _gained),
    ("zeros", _emptied),
    ("other step's state", _stale),
    ("swapped slots", _shifted),
)

Made = Callable[[str, str, Falsified], Perturbation]


def _results(made: Made) -> tuple[Perturbation, ...]:
    return tuple(made(kind.name, "results", partial(_outputs, kind)) for kind in NUMBERS)


def _states(made: Made) -> tuple[Perturbation, ...]:
    return tuple(made(name, "state", partial(_state, change)) for name, change in _STATES)


#: Kind of observation that rules of schedules read -> its perturbations.
FALSIFIES: dict[Reads, tuple[Perturbation, ...]] = {
    "run": (_of_trace("no end", "run", _raised),),
    "casts": (_of_trace("one code up", "casts", _inexact),),
    "operands": _operands(_ALL),
    "formats": (_of_trace("other precision", "operands", partial(_sides, _other_precision, _ALL)),),
    "states": _states(_of_trace),
    "kept state": (_of_trace("kept", "state", _kept),),
    "recomputed": (
        *_operands(("recompute",)),
        _of_trace("other format", "operands", partial(_sides, _other_format, ("recompute",))),
    ),
    "pending": (_of_trace("left over", "what is set aside", _left_over),),
    "results": _results(_of_trace),
    "results on ranks": _results(_of_last_rank),
    "states on ranks": _states(_of_last_rank),
    "after other models": (*_results(_after_others), *_states(_after_others)),
}
