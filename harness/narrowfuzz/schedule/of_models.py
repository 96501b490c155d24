"""What may happen to a model that a library has converted: which events, and how they are drawn.

The vocabulary is the one of a library's own layers. What a converted model has not is refused with
the event and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narrowfuzz.case import Spec
from narrowfuzz.models.zoo import MODELS
from narrowfuzz.schedule.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Schedule,
    Switch,
)
from narrowfuzz.schedule.rules import Standing, without
from narrowfuzz.schedule.simplify import simplifications
from narrowfuzz.schedule.story import FEATURES as ASKS
from narrowfuzz.schedule.story import story
from narrowfuzz.schedule.walk import Choose, Habits, walk

#: Features that a model's events may have.
FEATURES = (
    "interleaved", "eval between", "inside autocast", "accumulated", "sum of forwards",
    "second backward", "forward dropped", "reload", "zero", "spike", "inf", "decaying",
)  # fmt: skip
#: Steps of a training that is drawn.
_STEPS = (2, 2, 3)
#: Whether forwards without a graph come in between, and whether graphs are kept.
_ODDITIES = ((True, False), (True, False), (False, False), (False, True), (True, True))


def check_events(spec: Spec, *, autocasts: bool) -> None:
    """Raise ValueError naming the first event that cannot come where it stands, or that a model of
    this Spec cannot play; ``autocasts``: its recipe is drawn under autocast."""
    if spec.events and (spec.steps, spec.microbatches, spec.grad_mode) != (1, 1, "train"):
        raise ValueError(
            "events say what each step is: leave steps, microbatches and grad_mode at their "
            "defaults"
        )
    standing = Standing()
    for i, event in enumerate(spec.events):
        objection = standing.objection(event) or _objection(spec, event, autocasts)
        if objection:
            raise ValueError(f"event {i} ({type(event).__name__}) is not valid there: {objection}")
        standing.take(event)


def _objection(spec: Spec, event: Event, autocasts: bool) -> str:
    """Why a model of this Spec cannot play the event; "" if it can."""
    ids = MODELS[spec.model].takes_ids
    match event:
        case Open() | Close():
            return "a converted model has no regions: a forward runs under autocast by inside=true"
        case Switch():
            return "a model is converted once, and its recipe does not change"
        case Forward(first=first, path=path) if first is not None or path:
            return "a converted model has neither weights to keep nor branches"
        case Forward(inside=True) if spec.dtype != "fp32" or not autocasts:
            return f"{spec.recipe} is not run under autocast in {spec.dtype}"
        case Forward(inside=True) if spec.checkpoint == "reentrant":
            return "a reentrant checkpoint's detached inputs are leaves, whose casts autocast keeps"
        case Forward(values=values, shift=shift) if ids and (values != "gaussian" or shift):
            return f"token ids of {spec.model} are neither scaled nor special"
        case Backward(retain=True) if spec.compile != "none":
            return "a compiled graph gives its buffers away: kept graphs need compile 'none'"
        case Backward(retain=True) if spec.checkpoint == "selective":
            return "torch runs a selectively recomputed region backward once"
    return ""


def drawn_events(choose: Choose, spec: Spec, *, autocasts: bool) -> tuple[Event, ...]:
    """The events of a training that the rules allow: a walk of a library's layers, without its
    regions."""
    looks, retains = choose("events", *_ODDITIES)
    keeps = spec.compile == "none" and spec.checkpoint != "selective"
    calm = choose("events", True, True, False)
    habits = Habits(
        steps=choose("events", *_STEPS),
        looks=looks,
        retains=retains and keeps,
        calm=calm,
        special=() if calm else ("zero", "spike"),
        reload_at=choose("events", 0, 0, 3, 6) if spec.compile == "none" else 0,
    )
    narrows = autocasts and spec.dtype == "fp32" and spec.checkpoint != "reentrant"
    inside = narrows and not spec.autocast and choose("events", False, False, True)
    back = choose("events", False, True)
    plain = MODELS[spec.model].takes_ids
    return tuple(
        _of_a_model(event, inside=inside, back=back, plain=plain)
        for event in walk(choose, habits)
        if not isinstance(event, Open | Close)
    )


def _of_a_model(event: Event, *, inside: bool, back: bool, plain: bool) -> Event:
    if isinstance(event, Forward):
        event = msgspec.structs.replace(event, inside=inside and event.mode == "train")
        return msgspec.structs.replace(event, values="gaussian", shift=0) if plain else event
    return Reload(back=back) if isinstance(event, Reload) else event


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


def numbered(events: tuple[Event, ...]) -> Iterator[tuple[int, Event]]:
    """Every event with how many of its kind came before it."""
    counts: dict[type, int] = {}
    for event in events:
        number = counts.get(type(event), 0)
        counts[type(event)] = number + 1
        yield number, event
