"""What a library's checkpoint does to scaling state where it departs from the rules: nothing.

A recompute stages and commits nothing, says the rule. TransformerEngine's opens a region of its own
for each, and tells layers anew who updates gradients; this follows it where the ledger says so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from narrowfuzz.case import Spec
from narrowfuzz.moments import Moment, SlotName
from narrowfuzz.oracles.schedule_as_built import AsBuilt
from narrowfuzz.oracles.schedule_evidence import Progress, steps_of
from narrowfuzz.schedule.events import Backward, Event, Forward

#: Arms of the library's own checkpoint.
LIBRARY_ARMS = ("eager+checkpoint", "eager+checkpoint_reentrant")


@dataclass
class Recomputes:
    """One arm's checkpoints: what stood around each forward, and what it was told."""

    arm: str
    spec: Spec
    as_built: AsBuilt
    #: Forwards whose checkpoint stood in an enabled region.
    around: set[int] = field(default_factory=set)
    #: Forwards that opened a region of their own.
    inside: set[int] = field(default_factory=set)
    #: Was the next layer told to update gradients, when each waiting segment ran? Oldest first.
    told: deque[bool] = field(default_factory=deque)
    #: Deviation -> updates of the forward direction that this event's recomputes make by it.
    updates: dict[str, int] = field(default_factory=dict)
    #: Are layers told in this event's recomputes whether they update gradients?
    told_again: bool = False
    #: Does each of them?
    owns: bool = False

    @property
    def library(self) -> bool:
        """False on arms whose recomputes, if any, the library knows nothing of."""
        return self.arm in LIBRARY_ARMS

    @property
    def reentrant(self) -> bool:
        """A forward builds no graph; layers are told what to update when they are recomputed."""
        return self.library and self.spec.reentrant

    @property
    def grouped(self) -> bool:
        """Of the layers recomputed together only the first is told: GroupedLinear does not put
        back what it was told, as others do."""
        return self.spec.layer == "grouped_linear" and self.spec.region == "whole"

    def modules(self) -> Modules:
        """Splits a backward's casts by the updates that come in between."""
        return Modules(self.spec.calls if self.grouped else 1)

    def event(self, event: Event, progress: Progress, moment: Moment) -> None:
        """Before the machine takes an event."""
        self.updates, self.told_again, self.owns = {}, False, False
        if isinstance(event, Forward) and event.inside:
            self.inside.add(progress.forwards)
        if isinstance(event, Forward) and event.mode == "train" and self.library:
            self._forward(event, progress, len(moment.calls))
        elif isinstance(event, Backward):
            self._ran(progress, moment)
            if self.library:
                self._backward(progress, moment)

    def keeps(self, waits: bool) -> bool:
        """Does a region opened in a checkpoint end without an update? There is no graph there."""
        graphless = self.arm.endswith("_reentrant")
        return graphless and self.as_built.follows("checkpointed_region_keeps", differs=waits)

    def _ran(self, progress: Progress, moment: Moment) -> None:
        """A recompute is its layer's last forward, whatever it runs under."""
        for call in moment.calls:
            if call.at.phase != "recompute":
                continue
            under, _ = progress.ran.get(call.at.forward, (None, None))
            enters = self.library and self._enters_regions
            if not enters and call.at.forward not in self.inside:
                under = progress.open[-1] if progress.open else None
            if self.library and not enters and call.layer not in self.as_built.high:
                continue  # what the layer ran in last stays
            # a recompute in high precision changes nothing, but for the inner one of two: there the
            # recompute of the outer is an ordinary forward
            inner = self.reentrant and self.spec.region == "nested"
            if under is not None or not enters or inner:
                self.as_built.called(call.layer, under)

    @property
    def _enters_regions(self) -> bool:
        """Does a recompute enter its forward's region anew? TransformerEngine's does since 2.0."""
        return "recompute_updates_forward" in self.as_built.deviations

    def _forward(self, event: Forward, progress: Progress, calls: int) -> None:
        if progress.open and progress.open[-1] is not None:
            self.around.add(progress.forwards)
        first = self.as_built.first
        takes = progress.inner(event) is not None and not event.inside and not self.reentrant
        segments = {"each": calls, "whole": 1, "nested": calls + 1}[self.spec.region]
        # the outer one of nested checkpoints asks first, and a frozen layer takes no update
        nested = self.spec.region == "nested"
        taken = 1 + nested + (self.spec.layout == "frozen_first")
        self.told += [first and not (takes and i >= taken) for i in range(segments)]

    def _backward(self, progress: Progress, moment: Moment) -> None:
        again = [call.at.forward for call in moment.calls if call.at.phase == "recompute"]
        if self.spec.region == "whole":
            again = sorted(set(again))
        for forward in again:
            if forward in progress.ran and (self._enters_regions or forward in self.inside):
                self.as_built.chose(progress.ran[forward][0])
        told = [self.told.popleft() for _ in again if self.told]
        if told:
            self.as_built.recomputed(told[-1])
        if not progress.open:
            around = [forward for forward in again if forward in self.around]
            inner = [forward for forward in around if forward in self.inside]
            self.updates = {
                "recompute_updates_forward": len(around),
                "inner_recompute_updates_forward": len(inner),
            }
        if self.reentrant and self.as_built.follows("segments_update_gradients", differs=False):
            self.told_again = True
            narrow = any(forward in progress.ran for forward in again)
            self.owns = narrow and (not progress.open or any(told))
            if self.grouped and self.spec.layout == "dangling":
                self.owns = False  # the layer that is told is not reached


@dataclass
class Modules:
    """Tells the casts of one layer's backward from the next's."""

    #: Layers that share an update.
    every: int = 1
    seen: set[SlotName] = field(default_factory=set)
    ended: int = 0

    def updates_before(self, slot: SlotName) -> bool:
        """True if this cast is another layer's first, and those that ended had an update due."""
        new = bool(self.seen) and (slot in self.seen or slot.layer != next(iter(self.seen)).layer)
        self.seen = {slot} if new else self.seen | {slot}
        self.ended += new
        return new and self.ended % self.every == 0


def circumstances(spec: Spec, arm: str) -> str:
    """What separates causes on the arms of a library's checkpoint; part of the symptom."""
    if arm not in LIBRARY_ARMS:
        return ""
    told = {
        "nested": spec.region == "nested",
        "another precision in between": _changes_precision(spec),
        "high precision recomputed in a region": any(
            isinstance(event, Backward)
            and any(progress.open[-1:])
            and not set(event.of) <= progress.ran.keys()
            for _, event, progress in steps_of(spec)
        ),
    }
    return "".join(f", {name}" for name, holds in told.items() if holds)


def unfinished(spec: Spec) -> str:
    """Is there a checkpointed layer call that no backward reaches?"""
    forwards = [e for e in spec.events if isinstance(e, Forward)]
    trained = {i for i, event in enumerate(forwards) if event.mode == "train"}
    used = {f for event in spec.events if isinstance(event, Backward) for f in event.of}
    alone = spec.layout in ("dangling", "frozen_first") or bool(trained - used)
    return ", some forward unused" if alone else ""


def _changes_precision(spec: Spec) -> bool:
    """Did a layer that is recomputed run in the other precision last?"""
    last: dict[int, bool] = {}
    ran: dict[int, tuple[int, bool]] = {}
    for _, event, progress in steps_of(spec):
        if isinstance(event, Forward):
            narrow = progress.inner(event) is not None
            last[event.path] = narrow
            ran[progress.forwards] = (event.path, narrow)
        elif isinstance(event, Backward) and any(last[ran[f][0]] != ran[f][1] for f in event.of):
            return True
    return False
