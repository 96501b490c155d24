"""The settings and regions of a library's own layers, event by event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from narrowfuzz.case.event_text import sentence
from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Settings,
    Step,
    Switch,
    switched,
)
from narrowfuzz.case.spec import Spec
from narrowfuzz.trace.address import At
from narrowfuzz.trace.snapshots import ExecutionPoint


@dataclass(eq=False)
class Region:
    """One outermost region."""

    #: First training forward that ran in FP8 in it.
    first: int = -1
    #: A forward opened it for itself.
    own: bool = False


@dataclass
class Progress:
    """The progress of a schedule: settings, open regions, and what each forward ran under."""

    settings: Settings
    open: list[Settings | None] = field(default_factory=list)
    outermost: Region = field(default_factory=Region)
    forwards: int = 0
    #: Training forward that ran in FP8 -> its settings and its outermost region.
    ran: dict[int, tuple[Settings, Region]] = field(default_factory=dict)
    #: Those of them that ran in a region inside another.
    nested: set[int] = field(default_factory=set)

    def inner(self, event: Forward) -> Settings | None:
        """The settings that a forward's layers run under; None: high precision."""
        if event.inside:
            return self.settings
        return self.open[-1] if self.open else None

    def take(self, event: Event) -> None:
        match event:
            case Open(enabled=enabled):
                if not self.open:
                    self.outermost = Region()
                self.open.append(self.settings if enabled else None)
            case Close():
                self.open.pop()
            case Switch():
                self.settings = switched(self.settings, event)
            case Forward(mode=mode):
                inner = self.inner(event)
                if inner is not None and mode == "train":
                    region = self.outermost if self.open else Region(own=True)
                    if region.first < 0:
                        region.first = self.forwards
                    self.ran[self.forwards] = (inner, region)
                    if len(self.open) + event.inside > 1:
                        self.nested.add(self.forwards)
                self.forwards += 1


def steps_of(spec: Spec) -> Iterator[tuple[int, Event, Progress]]:
    """Every event with the progress before it."""
    progress = Progress(spec.settings)
    for i, event in enumerate(spec.events):
        yield i, event, progress
        progress.take(event)


def place(spec: Spec, event: int) -> str:
    """``event 4, backward({y0: g})``; -1 is before the first."""
    if event < 0:
        return "building the model"
    number = sum(isinstance(e, Forward) for e in spec.events[:event])
    return f"event {event}, {sentence(spec.events[event], number)}"


def address_of(what: At, event: int, at: ExecutionPoint) -> At:
    """An address with the event, the phase, the forward and its layer call."""
    return msgspec.structs.replace(
        what, event=event, phase=at.phase, of=at.forward, call=max(at.call, 0)
    )


def order_lost(spec: Spec) -> int:
    """The event of the first step whose gradients are sums in an order that autograd's engine
    chooses; the number of events if there is none.

    A reentrant checkpoint adds each segment's weight gradients as it is reached; a plain backward
    sums those of one pass first. Both are right, and after that step the models differ.
    """
    sums = False
    for i, event in enumerate(spec.events):
        if isinstance(event, Backward):
            sums |= len(event.of) > 1 or spec.layout == "twice"
        elif isinstance(event, Step) and sums:
            return i
    return len(spec.events)
