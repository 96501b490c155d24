"""Simpler neighbours of a schedule, for a minimiser that continues from any that it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from narrowfuzz.case.altered import around_forwards
from narrowfuzz.case.event_rules import check_schedule, repaired, simpler, without
from narrowfuzz.case.events import Close, Event, Forward, Open, Settings, Wraps
from narrowfuzz.case.sharding import UNSHARDED, Sharding
from narrowfuzz.case.spec import AnyCheckpoint, Spec, fields_of
from narrowfuzz.models.catalog import LIBRARY

#: What a checkpoint may wrap, from the most complex to the simplest.
_WRAPS: tuple[Wraps, ...] = ("nested", "whole", "each")
#: Checkpoint -> the simpler ones, nearer to none.
_NEARER: dict[str, tuple[AnyCheckpoint, ...]] = {
    "by_torch_reentrant": ("none", "reentrant", "by_torch"),
    "by_torch": ("none", "full"),
    "reentrant": ("none", "full"),
    "full": ("none",),
}


def simplifications(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Valid Specs of a library's layers that are simpler in one respect, each with a short phrase
    that names the change.

    Large changes come first: halves of the events, single events (last first), the fields of the
    model, the fields of each event. No candidate equals ``spec``, and every candidate is smaller in
    one fixed order, so repeated simplification terminates.
    """
    for name, candidate in _candidates(spec):
        if candidate != spec and _valid(candidate):
            yield name, candidate


def _candidates(spec: Spec) -> Iterator[tuple[str, Spec]]:
    for name, events in smaller(spec.events):
        yield name, _with(spec, events=events)
    around = _in_one_region(spec.events)
    if _weight(around) < _weight(spec.events):
        yield "one region around all", _with(spec, events=around)
    yield from _models(spec)
    for name, events in simpler_fields(spec.events):
        yield name, _with(spec, events=events)


def smaller(events: tuple[Event, ...]) -> Iterator[tuple[str, tuple[Event, ...]]]:
    """The events without one half of them, or without a single one, each with a phrase that names
    what was dropped."""
    half = len(events) // 2
    if half > 1:
        yield "without the second half", without(events, *range(half, len(events)))
        yield "without the first half", without(events, *range(half))
    for i in reversed(range(len(events))):
        yield f"without event {i} ({_name(events[i])})", without(events, i)


def simpler_fields(events: tuple[Event, ...]) -> Iterator[tuple[str, tuple[Event, ...]]]:
    """The events with one field of one event at its default, each with a phrase that names it."""
    for i in reversed(range(len(events))):
        for other in simpler(events[i]):
            changed = repaired((*events[:i], other, *events[i + 1 :]))
            yield f"event {i} ({_name(events[i])}): {_difference(events[i], other)}", changed


def simpler_events(events: tuple[Event, ...]) -> Iterator[tuple[str, tuple[Event, ...]]]:
    """The events of a converted model, simpler in one respect, each with a phrase that names the
    change. Regions still contain nothing but forwards."""
    for name, changed in (*smaller(events), *simpler_fields(events)):
        if (valid := around_forwards(changed)) != events:
            yield name, valid


def _in_one_region(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events in a single region that is never closed. Forwards that need a region cannot lose
    their own one by one."""
    bare = (event for event in events if not isinstance(event, Open | Close))
    return repaired((Open(), *(_with_fields(event, inside=False) for event in bare)))


def _weight(events: tuple[Event, ...]) -> tuple[int, int]:
    """Sort key for the size of a schedule. A forward's own region counts as an event, because one
    region around all events is easier to read."""
    own = sum(isinstance(event, Forward) and event.inside for event in events)
    return len(events) + own, own


def _models(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Specs with one field of the model or of its settings nearer to its default."""
    if spec.layout == "branch":
        one = tuple(_with_fields(event, path=0) for event in spec.events)
        yield "layout chain", _with(spec, layout="chain", events=repaired(one))
    elif spec.layout != "chain":
        yield "layout chain", _with(spec, layout="chain")
    settings = msgspec.structs.replace(spec.settings, reduces=_default(Settings, "reduces"))
    yield "one process", _with(spec, sharding=UNSHARDED, settings=settings)
    for data in range(1, spec.sharding.data):
        yield f"{data} ranks", _with(spec, sharding=Sharding(data=data))
    for depth in range(1, spec.depth):
        yield f"depth {depth}", _with(spec, depth=depth)
    if spec.checkpoint != "none":
        for wraps in reversed(_WRAPS[_WRAPS.index(spec.wraps) + 1 :]):
            yield f"checkpoint {wraps}", _with(spec, wraps=wraps)
        for checkpoint in _NEARER[spec.checkpoint]:
            wraps = _default(Spec, "wraps") if checkpoint == "none" else spec.wraps
            yield f"checkpoint {checkpoint}", _with(spec, checkpoint=checkpoint, wraps=wraps)
    yield "layer at its default", _with(spec, model=next(iter(LIBRARY)))
    yield "quantized_init at its default", _with(spec, quantized_init=False)
    yield "settings at their defaults", _with(spec, settings=Settings())
    for name in Settings.__struct_fields__:
        other = msgspec.structs.replace(spec.settings, **{name: _default(Settings, name)})
        yield f"{name} at its default", _with(spec, settings=other)


def _valid(spec: Spec) -> bool:
    try:
        check_schedule(spec)
    except ValueError:
        return False
    return True


def _with_fields(event: Event, **changes: Any) -> Event:
    """A forward with these fields changed; any other event unchanged."""
    return msgspec.structs.replace(event, **changes) if isinstance(event, Forward) else event


def _name(event: Event) -> str:
    return type(event).__name__.lower()


def _difference(old: Event, new: Event) -> str:
    """The fields in which ``new`` differs from ``old``, as text."""
    return ", ".join(
        f"{name}={getattr(new, name)!r}"
        for name in old.__struct_fields__
        if getattr(old, name) != getattr(new, name)
    )


def _default(struct: type[msgspec.Struct], name: str) -> Any:
    return next(info.default for info in fields_of(struct) if info.name == name)


def _with(spec: Spec, **changes: Any) -> Spec:
    return msgspec.structs.replace(spec, **changes)
