"""A Spec of a library's layers as the player takes it: events, and its other arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowfuzz.case import LEARNING_RATE, Spec
from narrowfuzz.play import schedule as play
from narrowfuzz.schedule.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Settings,
    Step,
    Switch,
    numbered,
    switched,
)


def plain(settings: Settings) -> play.Settings:
    """The settings as the player hands them to a library's verbs."""
    return play.Settings(*(getattr(settings, name) for name in play.Settings._fields))


def played(spec: Spec) -> tuple[play.Event, ...]:
    """One event of the player for each of the Spec's."""
    return tuple(_events(spec))


def _events(spec: Spec) -> Iterator[play.Event]:
    settings = spec.settings
    forwards = backwards = 0
    for event in spec.training:
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


def arguments(spec: Spec, *, caching: bool) -> dict[str, Any]:
    """What ``train`` takes by keyword, but for the subject, who listens, and whether anything is
    recomputed; ``caching`` says whether layers take ``is_first_microbatch``."""
    names = [str(i) for i in range(spec.layers)]
    return {
        "happens": tuple(dict.fromkeys(kind for kind, *_ in played(spec))),
        "order": tuple(names * 2 if spec.layout == "twice" else names),
        "layout": spec.layout,
        "frozen": spec.layout == "frozen_first",
        "each": spec.region in ("each", "nested"),
        "whole": spec.region in ("whole", "nested"),
        "by": spec.checkpoint_by,
        "reentrant": spec.reentrant,
        "caching": caching,
        "rate": LEARNING_RATE["sgd"],
    }


def numbers_of(spec: Spec) -> Iterator[tuple[int, Event, int]]:
    """Every event with its index, and how many of its kind came before it."""
    for i, (number, event) in enumerate(numbered(spec.training)):
        yield i, event, number
