"""Writes the story of a finding about a library's own layers: the lines of its schedule, the guilty
event, and the guilty slot's state over the events."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from narrowfuzz.case.event_text import heading, lines
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import place
from narrowfuzz.trace.snapshots import SlotName
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.finding import State, Story


def story_of(evidence: Evidence, verdict: Verdict) -> Story:
    """The story of one first cause in a case of a library's own layers."""
    event = verdict.at.event
    slot = slot_of_verdict(verdict) or _followed(evidence.in_one_process)
    traces = dict(evidence.in_one_process)
    for arm, trace in evidence.on_ranks.items():
        traces |= {f"{arm}, rank {rank}": own for rank, own in enumerate(trace.ranks)}
    return Story(
        lines=[heading(evidence.spec), *lines(evidence.spec)],
        event=event,
        broke=f"{verdict.rule}: {verdict.role} {verdict.symptom}"
        + (f", {place(evidence.spec, event)}" if event >= 0 else ""),
        slot="" if slot is None else str(slot),
        states={} if slot is None else {a: _states(t, slot) for a, t in traces.items()},
    )


def slot_of_verdict(verdict: Verdict) -> SlotName | None:
    """The slot that a verdict names, if it names one."""
    at = verdict.at
    if at.what not in ("state", "cast") or at.name not in ("forward", "backward"):
        return None
    return SlotName(at.layer, at.name, at.index[0])  # type: ignore[arg-type]


def _followed(traces: Mapping[str, Trace]) -> SlotName | None:
    """The first slot whose state differs between two arms, or else the first slot; None if there
    are no slots."""
    held = [[moment.state for moment in trace.moments] for trace in traces.values()]
    slots = sorted({slot for states in held for state in states for slot in state})
    for states in zip(*held, strict=False):
        for slot in slots:
            seen = [state[slot] for state in states if slot in state]
            if any(not other.equals(seen[0]) for other in seen[1:]):
                return slot
    return slots[0] if slots else None


def _states(trace: Trace, slot: SlotName) -> list[State]:
    return [
        State(moment.event, _number(held.scale), [_number(x) for x in held.window])
        for moment in trace.moments
        if (held := moment.state.get(slot)) is not None
    ]


def _number(x: np.float32) -> float | str:
    return float(x) if np.isfinite(x) else str(float(x))
