"""Simpler neighbours of a schedule, for a minimiser that goes on from any it can use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from narrowfuzz.schedule.events import Close, Event, Forward, Open, Schedule, Settings
from narrowfuzz.schedule.rules import check_schedule, repaired, simpler, without

#: Checkpointed regions, dear to cheap.
_REGIONS = ("nested", "whole", "each", "none")


def simplifications(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Valid schedules that are simpler in one respect, each with what was done in a few words.

    Large changes come first: halves of the events, single events (last first), the fields of the
    model, the fields of each event. No candidate equals ``schedule``, and every candidate is
    smaller in one fixed order, so that going on from any of them ends.
    """
    for name, candidate in _candidates(schedule):
        if candidate != schedule and _valid(candidate):
            yield name, candidate


def _candidates(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    def run(events: tuple[Event, ...]) -> Schedule:
        return _with(schedule, events=events)

    events = schedule.events
    half = len(events) // 2
    if half > 1:
        yield "without the second half", run(without(events, *range(half, len(events))))
        yield "without the first half", run(without(events, *range(half)))
    for i in reversed(range(len(events))):
        yield f"without event {i} ({_name(events[i])})", run(without(events, i))
    around = _in_one_region(events)
    if _weight(around) < _weight(events):
        yield "one region around all", run(around)
    yield from _models(schedule)
    for i in reversed(range(len(events))):
        for other in simpler(events[i]):
            changed = repaired((*events[:i], other, *events[i + 1 :]))
            yield f"event {i} ({_name(events[i])}): {_difference(events[i], other)}", run(changed)


def _in_one_region(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """A single region, never left. Forwards that need one cannot lose theirs one by one."""
    bare = (event for event in events if not isinstance(event, Open | Close))
    return repaired((Open(), *(_with_fields(event, inside=False) for event in bare)))


def _weight(events: tuple[Event, ...]) -> tuple[int, int]:
    """A forward's own region counts as an event: a region around all reads more plainly."""
    own = sum(isinstance(event, Forward) and event.inside for event in events)
    return len(events) + own, own


def _models(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Fields of the schedule and of its settings, each nearer to its default."""
    if schedule.layout == "branch":
        one = tuple(_with_fields(event, path=0) for event in schedule.events)
        yield "layout chain", _with(schedule, layout="chain", events=repaired(one))
    elif schedule.layout != "chain":
        yield "layout chain", _with(schedule, layout="chain")
    for depth in range(1, schedule.depth):
        yield f"depth {depth}", _with(schedule, depth=depth)
    for region in reversed(_REGIONS[_REGIONS.index(schedule.checkpoint) + 1 :]):
        yield f"checkpoint {region}", _with(schedule, checkpoint=region)
    for name in ("layer", "checkpoint_by", "reentrant", "quantized_init"):
        yield f"{name} at its default", _with(schedule, **{name: _default(Schedule, name)})
    yield "settings at their defaults", _with(schedule, settings=Settings())
    for name in Settings.__struct_fields__:
        told = msgspec.structs.replace(schedule.settings, **{name: _default(Settings, name)})
        yield f"{name} at its default", _with(schedule, settings=told)


def _valid(schedule: Schedule) -> bool:
    try:
        check_schedule(schedule)
    except ValueError:
        return False
    return True


def _with_fields(event: Event, **changes: Any) -> Event:
    """A forward with other fields; any other event as it is."""
    return msgspec.structs.replace(event, **changes) if isinstance(event, Forward) else event


def _name(event: Event) -> str:
    return type(event).__name__.lower()


def _difference(old: Event, new: Event) -> str:
    """What ``new`` says otherwise."""
    return ", ".join(
        f"{name}={getattr(new, name)!r}"
        for name in old.__struct_fields__
        if getattr(old, name) != getattr(new, name)
    )


def _default(struct: type[msgspec.Struct], name: str) -> Any:
    return next(info.default for info in msgspec.structs.fields(struct) if info.name == name)


def _with(schedule: Schedule, **changes: Any) -> Schedule:
    return msgspec.structs.replace(schedule, **changes)
