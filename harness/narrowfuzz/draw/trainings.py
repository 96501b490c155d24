"""What may happen to a model that a library has converted: which events, and how they are drawn.

The vocabulary is the one of a library's own layers.
"""

from __future__ import annotations

import msgspec

from narrowfuzz.case.altered import around_forwards, without_regions
from narrowfuzz.case.events import Backward, Event, Forward, Reload
from narrowfuzz.case.spec import Spec
from narrowfuzz.draw.walk import Choose, Habits, walk
from narrowfuzz.models.catalog import takes_ids

#: Steps of a training that is drawn.
_STEPS = (2, 2, 3)
#: Whether forwards without a graph come in between, and whether graphs are kept.
_ODDITIES = ((True, False), (True, False), (False, False), (False, True), (True, True))


def drawn_events(choose: Choose, spec: Spec, *, autocasts: bool) -> tuple[Event, ...]:
    """The events of a training that the rules allow: a walk of a library's layers, whose regions
    are autocast's where there is some."""
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
        # what a region keeps of them, a forward with a graph may get
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
