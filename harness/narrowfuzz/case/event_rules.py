"""Validity of schedules, and how to keep a schedule valid when an event is dropped.

A valid schedule is one a user could have written: a backward has a forward whose graph still
exists, weights are reused only while nothing changed them, the optimizer steps between graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Step,
    Switch,
)
from narrowfuzz.case.spec import Spec, fields_of
from narrowfuzz.models.catalog import FIELDS_OF_CONVERTED


@dataclass
class Standing:
    """The state of a schedule after some of its events."""

    #: Open regions, outermost first: True for an enabled one.
    regions: list[bool] = field(default_factory=list)
    #: Number of forwards so far.
    forwards: int = 0
    #: Number of a forward whose graph exists -> number of switches before it.
    live: dict[int, int] = field(default_factory=dict)
    #: Number of switches so far.
    switches: int = 0
    #: Branches whose cast weights are cached; a change of the weights or the recipe empties it.
    cached: set[int] = field(default_factory=set)
    #: Live forwards that use cached weights.
    holding: set[int] = field(default_factory=set)
    #: A gradient has been accumulated since the last step.
    accumulated: bool = False

    def objection(self, event: Event) -> str:
        """Why ``event`` cannot come next; "" if it can."""
        match event:
            case Open() if len(self.regions) >= 2:
                return "regions nest at most two deep"
            case Close() if not self.regions:
                return "there is no open region to close"
            case Forward(first=False, path=path) if path not in self.cached:
                return "no forward with first=True has cached the weights since they last changed"
            case Forward(first=True) if self.holding:
                return "an earlier forward's graph still needs the weights kept for it"
            case Forward(first=first, mode=mode) if first is not None and mode != "train":
                return "weights are cached by training forwards"
            case Forward(first=first, inside=inside) if first is not None and not (
                inside or (self.regions and self.regions[-1])
            ):
                return "weights are cached inside an enabled region"
            case Backward(of=of) if len(set(of)) != len(of):
                return "a forward is named twice"
            case Backward(of=of) if not set(of) <= self.live.keys():
                gone = sorted(set(of) - self.live.keys())[0]
                return f"forward {gone} has no graph (not run, not in train mode, or already used)"
            case Backward(of=of) if len({self.live[f] for f in of}) > 1:
                return "it sums forwards that ran under different settings"
            case Step() | Reload() if self.live:
                return "a forward's graph still waits for its backward"
            case Reload() if self.accumulated:
                return "an accumulated gradient waits for the optimizer"
            case Step() if not self.accumulated:
                return "no gradient has been accumulated"
            case Reload() | Switch() if self.regions:
                return "a region is open"
        return ""

    def take(self, event: Event) -> None:
        """Update the state by ``event``, which must be valid here."""
        match event:
            case Open(enabled=enabled):
                self.regions.append(enabled)
            case Close():
                self.regions.pop()
            case Forward(mode=mode, first=first, path=path):
                if mode == "train":
                    self.live[self.forwards] = self.switches
                if first is not None:
                    self.holding.add(self.forwards)
                if first:
                    self.cached.add(path)
                self.forwards += 1
            case Backward(of=of, retain=retain):
                self.accumulated = True
                for f in () if retain else of:
                    del self.live[f]
                    self.holding.discard(f)
            case Step() | Reload():
                self.cached, self.accumulated = set(), False
            case Switch():
                self.cached = set()
                self.switches += 1


def check_fields(spec: Spec, others: Collection[str], of: str) -> None:
    """Raise ValueError naming a field that is set but would have no effect: one of ``others``,
    which belong to another kind of model (``of``), or ``steps``, ``microbatches`` or ``grad_mode``
    beside events."""
    for info in fields_of(Spec):
        if info.name in others and (value := getattr(spec, info.name)) != info.default:
            raise ValueError(
                f"{info.name} {value!r} is of {of}, and {spec.recipe} has none: leave it out"
            )
    if spec.events and (spec.steps, spec.microbatches, spec.grad_mode) != (1, 1, "train"):
        raise ValueError(
            "events say what each step is: leave steps, microbatches and grad_mode at their "
            "defaults"
        )


def check_order(events: Sequence[Event], refused: Callable[[Event, Standing], str]) -> None:
    """Raise ValueError naming the first event that is invalid at its place, or for which
    ``refused`` returns a reason."""
    standing = Standing()
    for i, event in enumerate(events):
        objection = standing.objection(event) or refused(event, standing)
        if objection:
            raise ValueError(f"event {i} ({type(event).__name__}) is not valid there: {objection}")
        standing.take(event)


def check_schedule(spec: Spec) -> None:
    """Raise ValueError naming the first event that is invalid at its place, or the first
    combination of fields that a model of a library's layers does not support."""
    check_fields(spec, FIELDS_OF_CONVERTED, "a converted model")
    check_order(spec.training, lambda event, standing: "")
    if spec.layout != "branch" and any(isinstance(e, Forward) and e.path for e in spec.training):
        raise ValueError("path 1 needs layout 'branch'")
    if spec.depth > 1 and spec.layout != "chain":
        raise ValueError(f"depth {spec.depth} needs layout 'chain'")
    if spec.reentrant and spec.layout == "frozen_first":
        raise ValueError(
            "a reentrant checkpoint passes gradients only if its input needs them, and layout "
            f"'frozen_first' is fed by one that needs none: no checkpoint {spec.checkpoint!r}"
        )


def repaired(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events without those that are invalid at their places. A backward keeps the forwards that
    still have a graph, under their new numbers; an invalid ``first`` of a forward becomes None."""
    result: list[Event] = []
    standing = Standing()
    renamed: dict[int, int] = {}
    seen = 0
    for event in events:
        now = event
        if isinstance(event, Backward):
            of = tuple(renamed[f] for f in event.of if renamed.get(f) in standing.live)
            if not of:
                continue
            now = msgspec.structs.replace(event, of=of)
        if isinstance(now, Forward) and standing.objection(now) and now.first is not None:
            now = msgspec.structs.replace(now, first=None)
        if not standing.objection(now):
            if isinstance(now, Forward):
                renamed[seen] = standing.forwards
            result.append(now)
            standing.take(now)
        seen += isinstance(event, Forward)
    return tuple(result)


def without(events: Sequence[Event], *dropped: int) -> tuple[Event, ...]:
    """The events without those at the indices ``dropped``, without the Close of a dropped Open, and
    without whatever becomes invalid by that. Forwards are renumbered."""
    gone = {*dropped, *(_partner(events, i) for i in dropped)}
    numbers = [i for i, event in enumerate(events) if isinstance(event, Forward)]
    named = {old: new for new, old in enumerate(n for n, i in enumerate(numbers) if i not in gone)}
    result: list[Event] = []
    for i, event in enumerate(events):
        if i in gone:
            continue
        if isinstance(event, Backward):
            of = tuple(named[f] for f in event.of if f in named)
            if not of:
                continue
            event = msgspec.structs.replace(event, of=of)
        result.append(event)
    return repaired(result)


def _partner(events: Sequence[Event], opened: int) -> int:
    """Index of the Close that belongs to this Open; -1 for any other event, or if there is none."""
    if not isinstance(events[opened], Open):
        return -1
    depth = 0
    for i in range(opened, len(events)):
        depth += isinstance(events[i], Open) - isinstance(events[i], Close)
        if depth == 0:
            return i
    return -1


def simpler(event: Event) -> Iterator[Event]:
    """Yield the event with one field at its default, for each field that differs from it. ``of`` is
    cut to its first forward."""
    for info in fields_of(type(event)):
        if info.name == "of":
            if len(event.of) > 1:  # type: ignore[union-attr]
                yield msgspec.structs.replace(event, of=event.of[:1])  # type: ignore[union-attr]
        elif getattr(event, info.name) != info.default:
            yield msgspec.structs.replace(event, **{info.name: info.default})
