"""A schedule as the player takes it: plain events, and what else ``train`` is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowfuzz.case import LEARNING_RATE
from narrowfuzz.play import schedule as play
from narrowfuzz.schedule.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Schedule,
    Settings,
    Step,
    Switch,
    numbered,
    switched,
)


def plain(settings: Settings) -> play.Settings:
    """The settings as the player hands them to a library's verbs."""
    return play.Settings(*(getattr(settings, name) for name in play.Settings._fields))


def played(schedule: Schedule) -> tuple[play.Event, ...]:
    """One event of the player for each of the schedule's."""
    return tuple(_events(schedule))


def _events(schedule: Schedule) -> Iterator[play.Event]:
    settings = schedule.settings
    forwards = backwards = 0
    for event in schedule.events:
        match event:
            case Open(enabled=enabled):
                yield "open", plain(settings) if enabled else None
            case Close():
                yield ("close",)
            case Forward():
                yield "forward", forwards, _how(event, settings)
                forwards += 1
            case Backward(of=of, retain=retain):
                yield "backward", backwards, of, retain
                backwards += 1
            case Step():
                yield ("step",)
            case Reload():
                yield "reload", plain(settings)
            case Switch():
                settings = switched(settings, event)
                yield ("switch",)


def _how(event: Forward, settings: Settings) -> dict[str, Any]:
    inside = plain(settings) if event.inside else None
    return {"mode": event.mode, "inside": inside, "first": event.first, "path": event.path}


def arguments(schedule: Schedule, *, caching: bool) -> dict[str, Any]:
    """What ``train`` takes by keyword, but for the subject, who listens, and whether anything is
    recomputed; ``caching`` says whether layers take ``is_first_microbatch``."""
    names = [str(i) for i in range(schedule.layers)]
    return {
        "happens": tuple(dict.fromkeys(kind for kind, *_ in played(schedule))),
        "order": tuple(names * 2 if schedule.layout == "twice" else names),
        "layout": schedule.layout,
        "frozen": schedule.layout == "frozen_first",
        "each": schedule.checkpoint in ("each", "nested"),
        "whole": schedule.checkpoint in ("whole", "nested"),
        "by": schedule.checkpoint_by,
        "reentrant": schedule.reentrant,
        "caching": caching,
        "rate": LEARNING_RATE["sgd"],
    }


def numbers_of(schedule: Schedule) -> Iterator[tuple[int, Event, int]]:
    """Every event with its index, and how many of its kind came before it."""
    for i, (number, event) in enumerate(numbered(schedule.events)):
        yield i, event, number
