"""What may happen to a model that a library has converted: which events, and how they are drawn.

The vocabulary is the one of a library's own layers. What a converted model has not is refused with
the event and the reason.
"""

from __future__ import annotations

from functools import partial
from typing import get_args

import msgspec

from narrowfuzz.case import Checkpoint, Spec
from narrowfuzz.catalog import FIELDS_OF_LIBRARY, MODELS, takes_ids, unregistered
from narrowfuzz.schedule.altered import around_forwards, without_regions
from narrowfuzz.schedule.events import Backward, Close, Event, Forward, Open, Reload, Step, Switch
from narrowfuzz.schedule.rules import Standing, check_fields, check_order
from narrowfuzz.schedule.walk import Choose, Habits, walk

#: Steps of a training that is drawn.
_STEPS = (2, 2, 3)
#: Whether forwards without a graph come in between, and whether graphs are kept.
_ODDITIES = ((True, False), (True, False), (False, False), (False, True), (True, True))


def check_events(spec: Spec, *, autocasts: bool) -> None:
    """Raise ValueError naming the first event that cannot come where it stands, or that a model of
    this Spec cannot play; ``autocasts``: its recipe is drawn under autocast."""
    if why := unregistered(spec.model):
        raise ValueError(why)
    if spec.layer:
        raise ValueError(f"{spec.recipe} converts models, and {spec.model} is a library's own")
    check_fields(spec, FIELDS_OF_LIBRARY, "a library's own layers")
    if spec.checkpoint not in get_args(Checkpoint):
        raise ValueError(
            f"checkpoint {spec.checkpoint!r} is of a library that has one of its own: "
            f"{spec.recipe} takes {', '.join(get_args(Checkpoint))}"
        )
    if spec.wraps != "whole" and (reason := _not_wrapped(spec)):
        raise ValueError(f"checkpoint {spec.checkpoint!r} does not wrap {spec.wraps!r}: {reason}")
    check_order(spec.events, partial(_objection, spec, autocasts))
    if sum(isinstance(e, Open) - isinstance(e, Close) for e in spec.events):
        raise ValueError("a region is open when the training ends: close it")


def _not_wrapped(spec: Spec) -> str:
    """Why this is not wrapped as the Spec says, "" where it is."""
    if spec.wraps == "each":
        return "of a converted model it wraps the whole, or that and parts of it ('nested')"
    if not MODELS[spec.model].parts:
        return f"{spec.model} has no parts that could be recomputed alone"
    selective = "torch keeps nothing for a selective checkpoint inside another"
    return selective if spec.checkpoint == "selective" else ""


def not_reentrant(model: str, *, autocast: bool) -> str:
    """Why this is not recomputed by the reentrant checkpoint, "" where it is."""
    if takes_ids(model):
        return "token ids carry no gradient, and it needs an input that does"
    return "its detached inputs are leaves, whose casts autocast keeps" if autocast else ""


def _objection(spec: Spec, autocasts: bool, event: Event, standing: Standing) -> str:
    """Why a model of this Spec cannot play the event there; "" if it can."""
    ids = takes_ids(spec.model)
    match event:
        case Backward() | Step() if standing.regions:
            return "autocast is for forwards: close the region first"
        case Open() if spec.autocast:
            return "all of it runs under autocast: leave the Spec's autocast at its default"
        case Switch():
            return "a model is converted once, and its recipe does not change"
        case Forward(first=first, path=path) if first is not None or path:
            return "a converted model has neither weights to keep nor branches"
        case Open() | Forward(inside=True) if spec.dtype != "fp32" or not autocasts:
            return f"{spec.recipe} is not run under autocast in {spec.dtype}"
        case Open() | Forward(inside=True) if spec.checkpoint == "reentrant":
            return f"no reentrant checkpoint: {not_reentrant(spec.model, autocast=True)}"
        case Forward(mode="inference"):
            return "a training is evaluated with mode 'eval' or 'no_grad'"
        case Forward(values=values, shift=shift) if ids and (values != "gaussian" or shift):
            return f"token ids of {spec.model} are neither scaled nor special"
        case Backward(retain=True) if spec.compile != "none":
            return "a compiled graph gives its buffers away: kept graphs need compile 'none'"
        case Backward(retain=True) if spec.checkpoint == "selective":
            return "torch runs a selectively recomputed region backward once"
    return ""


def drawn_events(choose: Choose, spec: Spec, *, autocasts: bool) -> tuple[Event, ...]:
    """The events of a training that the rules allow: a walk of a library's layers, whose regions
    are autocast's where there is some."""
    looks, retains = choose("events", *_ODDITIES)
    keeps = spec.compile == "none" and spec.checkpoint != "selective"
    calm = choose("events", True, True, False)
    narrows = autocasts and spec.dtype == "fp32" and spec.checkpoint != "reentrant"
    how = (
        choose("events", "", "inside", "regions", "regions")
        if narrows and not spec.autocast
        else ""
    )
    habits = Habits(
        steps=choose("events", *_STEPS),
        looks=looks,
        # what a region keeps of them, a forward with a graph may get
        looks_first=how == "regions" and looks,
        retains=retains and keeps,
        calm=calm,
        grad_trend=choose("events", (0, 0), (0, 0), (0, -3), (0, -6)),
        special=() if calm else ("zero", "spike"),
        dropped=choose("events", "", "", "", "inside"),
        reload_at=choose("events", 0, 0, 3, 6) if spec.compile == "none" else 0,
        nests=how == "regions" and choose("events", False, True, True),
    )
    back = choose("events", False, True)
    looks_first = back and choose("events", False, True)
    plain = takes_ids(spec.model)
    walked = walk(choose, habits)
    events = tuple(
        _of_a_model(event, how=how, back=back, plain=plain)
        for event in (around_forwards(walked) if how == "regions" else without_regions(walked))
    )
    return _evaluated_first(events) if looks_first else events


def _evaluated_first(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """An evaluation before each rollback: it is what tells that there is something to undo."""
    found: list[Event] = []
    more = 0
    for event in events:
        if isinstance(event, Reload):
            found.append(Forward(mode="eval"))
            more += 1
        if isinstance(event, Backward):  # no graph waits where a state is loaded
            event = msgspec.structs.replace(event, of=tuple(f + more for f in event.of))
        found.append(event)
    return tuple(found)


def _of_a_model(event: Event, *, how: str, back: bool, plain: bool) -> Event:
    if isinstance(event, Forward):
        inside = event.inside if how == "regions" else how == "inside" and event.mode == "train"
        event = msgspec.structs.replace(event, inside=inside)
        return msgspec.structs.replace(event, values="gaussian", shift=0) if plain else event
    return Reload(back=back) if isinstance(event, Reload) else event
