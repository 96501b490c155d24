"""Draws the events of a converted model's training; the events are those of a library's layers."""

from __future__ import annotations

import msgspec

from narrowfuzz.case.altered import around_forwards, without_regions
from narrowfuzz.case.events import Backward, Event, Forward, Reload
from narrowfuzz.case.spec import Spec
from narrowfuzz.draw.walk import Choose, Habits, walk
from narrowfuzz.models.catalog import takes_ids

#: Numbers of steps of a drawn training.
_STEPS = (2, 2, 3)
#: (there are forwards without a graph in between, some graphs are retained for a second backward).
_ODDITIES = ((True, False), (True, False), (False, False), (False, True), (True, True))


def drawn_events(choose: Choose, spec: Spec, *, autocasts: bool) -> tuple[Event, ...]:
    """Valid events of a training: a walk as for a library's layers. Its regions become autocast
    regions if the recipe is drawn under autocast, and are removed otherwise."""
    evaluates, retains = choose("events", *_ODDITIES)
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
        evaluates=evaluates,
        # a later forward with a graph may get what autocast cached for them in the same region
        looks_first=how == "regions" and evaluates,
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
    """The events with an evaluation before each rollback: by it a user sees that there is something
    to undo."""
    found: list[Event] = []
    more = 0
    for event in events:
        if isinstance(event, Reload):
            found.append(Forward(mode="eval"))
            more += 1
        if isinstance(event, Backward):  # all its forwards follow the reload: no graph outlives one
            event = msgspec.structs.replace(event, of=tuple(f + more for f in event.of))
        found.append(event)
    return tuple(found)


def _of_a_model(event: Event, *, how: str, back: bool, plain: bool) -> Event:
    if isinstance(event, Forward):
        inside = event.inside if how == "regions" else how == "inside" and event.mode == "train"
        event = msgspec.structs.replace(event, inside=inside)
        return msgspec.structs.replace(event, values="gaussian", shift=0) if plain else event
    return Reload(back=back) if isinstance(event, Reload) else event
