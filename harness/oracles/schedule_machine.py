"""O14: after every event, scales and windows are what the recipe's rules make of what was seen.

The machine (harness/numerics/delayed.py) is driven by the schedule and by the true maxima of the
tensors that were really quantised, so no number of the library enters what is expected of it.
After a divergence it goes on from what was observed: the next cause is seen, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from harness.numerics.delayed import FMAX, Policy, Slot, committed, fresh, resized, staged
from harness.oracles.oracle import number, plain
from harness.oracles.schedule_evidence import (
    Progress,
    Region,
    ScheduleEvidence,
    place,
    steps_of,
)
from harness.schedule.events import (
    Backward,
    Close,
    Event,
    Forward,
    Reload,
    Schedule,
    Settings,
    Switch,
)
from harness.schedule.trace import CastSeen, Moment, SlotName, StateTrace
from harness.verdict import Verdict


def check_machine(evidence: ScheduleEvidence) -> Iterator[Verdict]:
    """O14 on every arm."""
    for arm, trace in evidence.traces.items():
        if evidence.kind == "delayed" and not any(m.casts for m in trace.moments):
            # the true maxima are the machine's only input
            yield plain("O14", arm, "state", "inconclusive", "no cast was seen")
            continue
        found = list(_follow(_Machine(evidence), trace))
        yield from found
        if not found:
            judged = any(moment.state for moment in trace.moments) or evidence.kind != "delayed"
            yield plain("O14", arm, "state", "ok" if judged else "not_applicable")


@dataclass(frozen=True)
class Move:
    """One thing that a slot's state owes to an event."""

    event: int
    slot: SlotName
    kind: Literal["stage", "commit", "resize"]
    policy: Policy


def moves(evidence: ScheduleEvidence, trace: StateTrace) -> list[Move]:
    """What the state of every slot owes to this run, in order."""
    machine = _Machine(evidence)
    for _ in _follow(machine, trace):
        pass
    return machine.moves


@dataclass
class _Machine:
    """Expected state, and what is staged in it."""

    evidence: ScheduleEvidence
    event: int = 0
    moves: list[Move] = field(default_factory=list)
    slots: dict[SlotName, Slot] = field(default_factory=dict)
    #: As ``slots``, had the last commit not happened.
    uncommitted: dict[SlotName, Slot] = field(default_factory=dict)
    #: Quantised by some forward so far: all others' scales are not the schedule's doing.
    ran: set[SlotName] = field(default_factory=set)
    #: Ledger entries whose deviation was followed.
    explained: set[str] = field(default_factory=set)
    #: Staged since their last commit, and under which policy.
    waiting: dict[SlotName, Policy] = field(default_factory=dict)

    def stage(self, cast: CastSeen, policy: Policy) -> None:
        assert cast.slot is not None
        self.slots[cast.slot] = staged(self.slots[cast.slot], cast.amax)
        self.waiting[cast.slot] = policy
        self.moves.append(Move(self.event, cast.slot, "stage", policy))

    def resize(self, layer: str, policy: Policy) -> None:
        """A forward gives all windows of its layer the length its recipe asks for."""
        for name in [n for n in self.slots if n.layer == layer]:
            if len(self.slots[name].window) != policy.history:
                self.moves.append(Move(self.event, name, "resize", policy))
            self.slots[name] = resized(self.slots[name], policy.history)

    def commit(self, direction: str) -> None:
        for name in [n for n in self.waiting if n.direction == direction]:
            policy = self.waiting.pop(name)
            kind = policy.forward if direction == "forward" else policy.backward
            self.uncommitted[name] = self.slots[name]
            self.slots[name] = committed(self.slots[name], policy, FMAX[kind])
            self.moves.append(Move(self.event, name, "commit", policy))


def _follow(machine: _Machine, trace: StateTrace) -> Iterator[Verdict]:
    evidence = machine.evidence
    told: set[str] = set()
    for (i, event, progress), moment in zip(
        steps_of(evidence.schedule), trace.moments, strict=False
    ):
        before = dict(machine.slots)
        machine.event, machine.uncommitted = i, {}
        for verdict in _casts(machine, event, progress, moment):
            if verdict.symptom not in told:
                told.add(verdict.symptom)
                yield _placed(verdict, evidence, trace, i)
        _commits(machine, event, progress)
        for verdict in _compare(machine, before, event, moment):
            if verdict.symptom not in told:
                told.add(verdict.symptom)
                yield _placed(verdict, evidence, trace, i)
    for entry in sorted(machine.explained):
        yield plain("O14", trace.arm, "forward", "ok").known(entry)


def _casts(
    machine: _Machine, event: Event, progress: Progress, moment: Moment
) -> Iterator[Verdict]:
    """Stage what this event quantised; each cast must have used its slot's scale."""
    policy_of = machine.evidence.policy
    inner = progress.inner(event) if isinstance(event, Forward) else None
    trains = isinstance(event, Forward) and event.mode == "train"
    call = None
    for cast in moment.casts:
        if cast.slot is None or cast.at.phase == "recompute":
            continue
        settings = inner if cast.at.phase == "forward" else _settings_of(event, progress)
        policy = policy_of(settings) if settings is not None else None
        if policy is None:
            continue  # a cast in high precision is another rule's business
        if call is not None and cast.at.call != call and _own_region(machine, event, progress):
            machine.commit("forward")
        call = cast.at.call
        machine.ran.add(cast.slot)
        if cast.at.phase == "forward":
            machine.resize(cast.slot.layer, policy)
        slot = machine.slots.setdefault(cast.slot, fresh(policy.history))
        if cast.scale != slot.scale:
            yield Verdict(
                "O14", "", cast.slot.direction, "diverged",
                f"{cast.slot.direction} cast with another scale than its slot's", str(cast.slot),
                number(float(cast.scale or 0)), number(float(slot.scale)),
                side=cast.slot.layer, index=(cast.slot.index,),
            )  # fmt: skip
        stages = cast.at.phase == "backward" or trains
        entry = machine.evidence.deviations.get("evaluation_stages", "")
        if not stages and entry:
            machine.explained.add(entry)
        if stages or entry:
            machine.stage(cast, policy)


def _settings_of(event: Event, progress: Progress) -> Settings | None:
    """What the forwards of a backward ran under; the first's, where they differ."""
    assert isinstance(event, Backward)
    ran = [progress.ran[f][0] for f in event.of if f in progress.ran]
    return ran[0] if ran else None


def _own_region(machine: _Machine, event: Event, progress: Progress) -> bool:
    """True where each layer call of this forward opens an outermost region of its own."""
    schedule = machine.evidence.schedule
    return (
        isinstance(event, Forward)
        and event.inside
        and event.mode == "train"
        and not progress.open
        and schedule.checkpoint in ("each", "nested")
    )


def _commits(machine: _Machine, event: Event, progress: Progress) -> None:
    """The updates this event owes."""
    if isinstance(event, Close) and len(progress.open) == 1:
        machine.commit("forward")
    if isinstance(event, Forward) and event.inside and event.mode == "train" and not progress.open:
        machine.commit("forward")  # in no_grad, a region is left without an update
    if isinstance(event, Backward):
        regions: dict[Region, Settings] = {
            progress.ran[f][1]: progress.ran[f][0] for f in event.of if f in progress.ran
        }
        for region, settings in regions.items():
            policy = machine.evidence.policy(settings)
            assert policy is not None
            if policy.backward_commits == "each" or region.first in event.of:
                machine.commit("backward")


def _compare(
    machine: _Machine, before: dict[SlotName, Slot], event: Event, moment: Moment
) -> Iterator[Verdict]:
    quantised = machine.evidence.schedule.quantized_init
    for name, got in sorted(moment.state.items()):
        if quantised and name not in machine.ran:  # a parameter's own: written when it is
            machine.slots[name] = got
            continue
        want = machine.slots.get(name)
        if want is None:
            want = fresh(len(got.window))
        if isinstance(event, Reload) or name not in machine.waiting:
            want = resized(want, len(got.window)) if want.equals(fresh(len(want.window))) else want
        if not got.equals(want):
            unstaged = machine.uncommitted.get(name)
            symptom = _symptom(name, event, before.get(name), want, got, unstaged, machine)
            yield Verdict(
                "O14", "", name.direction, "diverged", symptom, str(name), _told(got), _told(want),
                side=name.layer, index=(name.index,),
            )  # fmt: skip
        machine.slots[name] = got


def _symptom(
    name: SlotName,
    event: Event,
    before: Slot | None,
    want: Slot,
    got: Slot,
    uncommitted: Slot | None,
    machine: _Machine,
) -> str:
    """The class of a divergence, in words that say what did not happen."""
    direction = name.direction
    if uncommitted is not None and got.equals(uncommitted):
        return f"{direction} scale not updated"
    if uncommitted is None and before is not None and want.equals(before):
        if isinstance(event, Backward | Close | Forward):
            if np.array_equal(got.window[1:], want.window[1:]) and got.scale == want.scale:
                return f"{direction} maximum staged by {_kind(event)}"
            return f"{direction} state moved without a commit by {_kind(event)}"
        return f"{direction} state changed by {_kind(event)}"
    if uncommitted is not None and got.window.tobytes() == want.window.tobytes():
        return f"{direction} scale"
    if got.scale == want.scale and len(got.window) == len(want.window):
        if np.array_equal(got.window[1:], want.window[1:]):
            return f"{direction} staged maximum"
        return f"{direction} window"
    return f"{direction} scale and window"


def _kind(event: Event) -> str:
    if isinstance(event, Forward) and event.mode != "train":
        return "an evaluation"
    return f"a {type(event).__name__.lower()}"


def _told(slot: Slot) -> str:
    window = ", ".join(f"{x:.4g}" for x in slot.window)
    return f"scale {number(float(slot.scale))} window [{window}]"


def _placed(verdict: Verdict, evidence: ScheduleEvidence, trace: StateTrace, event: int) -> Verdict:
    where = f"{place(evidence.schedule, event)}: {verdict.where}"
    symptom = verdict.symptom + _circumstances(evidence.schedule)
    return replace(
        verdict, arm=trace.arm, symptom=symptom, where=where, index=(event, *verdict.index)
    )


def _circumstances(schedule: Schedule) -> str:
    """What separates causes that look alike: another code path updates, or an unused layer is
    there whose backward never comes. Part of the symptom, so minimising keeps it."""
    switches = [e.algorithm for e in schedule.events if isinstance(e, Switch)]
    by_tensor = not schedule.settings.fused or "callable" in (
        schedule.settings.algorithm,
        *switches,
    )
    told = {"unfused": by_tensor, "unused layer": schedule.layout == "dangling"}
    return "".join(f", {name}" for name, holds in told.items() if holds)
