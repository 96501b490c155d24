"""The events of a model that a library has converted: what they exercise, and what may be left out
of them without changing the training."""

from __future__ import annotations

import msgspec

from narrowfuzz.schedule.events import (
    Backward,
    Event,
    Forward,
    Open,
    Reload,
    Schedule,
    numbered,
)
from narrowfuzz.schedule.rules import without
from narrowfuzz.schedule.simplify import simplifications
from narrowfuzz.schedule.story import FEATURES as ASKS
from narrowfuzz.schedule.story import story

#: Features that a model's events may have.
FEATURES = (
    "interleaved", "eval between", "inside autocast", "accumulated", "sum of forwards",
    "second backward", "forward dropped", "reload", "zero", "spike", "inf", "decaying",
)  # fmt: skip


def features(events: tuple[Event, ...]) -> frozenset[str]:
    """What a model's events exercise."""
    told = story(Schedule(events=(Open(), *events)))  # all of it is narrow
    autocast = any(isinstance(event, Forward) and event.inside for event in events)
    found = {name for name in FEATURES if ASKS[name](told)} - {"inside autocast"}
    return frozenset(found | ({"inside autocast"} if autocast else set()))


def simpler_events(events: tuple[Event, ...]) -> list[tuple[str, tuple[Event, ...]]]:
    """The events made simpler in one respect, each with what was done in a few words."""
    return [
        (phrase, simpler.events)
        for phrase, simpler in simplifications(Schedule(events=events))
        if not any(isinstance(event, Open) for event in simpler.events)
    ]


def outside_autocast(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events, none of them under autocast."""
    return tuple(
        msgspec.structs.replace(e, inside=False) if isinstance(e, Forward) else e for e in events
    )


def evaluations_dropped(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events without forwards that build no graph."""
    evaluations = [i for i, e in enumerate(events) if isinstance(e, Forward) and e.mode != "train"]
    return without(events, *evaluations)


def reloads_dropped(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events without those that save and load what is there."""
    return tuple(e for e in events if not isinstance(e, Reload) or e.back)


def in_order(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Each forward's backwards right behind it, one forward at a time."""
    after: dict[int, list[Backward]] = {}
    for event in events:
        if isinstance(event, Backward):
            for f in event.of:
                after.setdefault(f, []).append(msgspec.structs.replace(event, of=(f,)))
    kept: list[Event] = []
    for number, event in numbered(events):
        if not isinstance(event, Backward):
            kept.append(event)
        if isinstance(event, Forward):
            kept += after.get(number, [])
    return tuple(kept)
