"""Rewrites of a list of events, most of which must not change the result of the training: events
are left out, moved or replaced."""

from __future__ import annotations

import msgspec

from narrowfuzz.case.event_rules import without
from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Step,
    Switch,
    narrows,
    with_regions,
)


def outside_autocast(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events with all autocast regions removed."""
    return tuple(
        msgspec.structs.replace(e, inside=False) if isinstance(e, Forward) else e
        for e in without_regions(events)
    )


def evaluations_dropped(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events without the forwards that build no graph."""
    evaluations = [i for i, e in enumerate(events) if isinstance(e, Forward) and e.mode != "train"]
    return without(events, *evaluations)


def reloads_dropped(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events without the reloads that load the model's current state; rollbacks stay."""
    return tuple(e for e in events if not isinstance(e, Reload) or e.back)


def in_order(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events with each forward's backwards directly after it. A forward that ran in a region
    that narrows gets one of its own."""
    after: dict[int, list[Backward]] = {}
    for event in events:
        if isinstance(event, Backward):
            for f in event.of:
                after.setdefault(f, []).append(msgspec.structs.replace(event, of=(f,)))
    result: list[Event] = []
    forwards = 0
    for event, regions in with_regions(events):
        if isinstance(event, Forward):
            result.append(msgspec.structs.replace(event, inside=narrows(event, regions)))
            result += after.get(forwards, [])
            forwards += 1
        elif not isinstance(event, Open | Close | Backward):
            result.append(event)
    return tuple(result)


def without_regions(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events without ``Open`` and ``Close``; a forward's own region (``inside``) stays."""
    return tuple(event for event in events if not isinstance(event, Open | Close))


def around_forwards(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events with regions around forwards only: all open regions are closed before a Backward,
    Step or Reload and opened again after it. None is open at the end."""
    result: list[Event] = []
    regions: list[Open] = []

    def keep(event: Event) -> None:
        if isinstance(event, Close) and isinstance(result[-1], Open):
            result.pop()  # the region is empty
        else:
            result.append(event)

    for event in events:
        if isinstance(event, Backward | Step | Reload):
            for one in (*(Close() for _ in regions), event, *regions):
                keep(one)
            continue
        keep(event)
        if isinstance(event, Open):
            regions.append(event)
        if isinstance(event, Close):
            regions.pop()
    for _ in regions:
        keep(Close())
    return tuple(result)


def in_high_precision(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The same events outside every region, so that a library's layers compute unquantised."""
    return tuple(
        msgspec.structs.replace(event, inside=False, first=None)
        if isinstance(event, Forward)
        else event
        for event in without_regions(events)
    )


def through_reloads(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events with every reload replaced by a ``Switch`` that changes nothing, so that the
    events keep their indices."""
    return tuple(Switch() if isinstance(event, Reload) else event for event in events)
