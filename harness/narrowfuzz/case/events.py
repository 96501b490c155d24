"""The vocabulary of a training: plain records, strict JSON inside a case.

Events say what a training did: open and close an autocast region, run a
forward, run backward through one or several of them, step the optimizer, save and load, switch the
recipe. Forwards are named by their order: the first Forward event is number 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

#: What a tensor holds: normal values, zeros, one element 2^12 times the rest, one infinity.
Stimulus = Literal["gaussian", "zero", "spike", "inf"]
#: ``train`` builds a graph; ``no_grad`` and ``inference`` run in training mode without one;
#: ``eval`` neither.
Mode = Literal["train", "no_grad", "eval", "inference"]
Shift = Annotated[int, Meta(ge=-24, le=24)]
Algorithm = Literal["max", "most_recent", "callable"]
#: chain: one after the other. twice: one layer called twice. frozen_first: two, the first without
#: gradients and fed by an input that needs none. dangling: two side by side, the first's output
#: reaches no loss. branch: two, of which a forward runs one.
Layout = Literal["chain", "twice", "frozen_first", "dangling", "branch"]
#: Which part of the model a checkpoint wraps; ``nested`` wraps each layer inside the whole.
Wraps = Literal["whole", "each", "nested"]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a case file: unknown fields are refused, and defaults are left out."""


class Open(_Record, tag="open", frozen=True):
    """Enter an autocast region; inside another one it is nested."""

    enabled: bool = True


class Close(_Record, tag="close", frozen=True):
    """Leave the innermost region."""


class Forward(_Record, tag="forward", kw_only=True, frozen=True):
    """Run the model on a fresh input."""

    mode: Mode = "train"
    values: Stimulus = "gaussian"
    #: The input is multiplied by 2^shift.
    shift: Shift = 0
    #: Open a region of its own, inside whatever is checkpointed.
    inside: bool = False
    #: Weight caching: True casts and keeps the weights, False reuses them, None does neither.
    first: bool | None = None
    #: Which branch runs (layout ``branch``).
    path: Literal[0, 1] = 0


class Backward(_Record, tag="backward", kw_only=True, frozen=True):
    """One backward through the sum of these forwards' losses, each with a gradient of its own."""

    of: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4)]
    values: Stimulus = "gaussian"
    #: Output gradients are multiplied by 2^shift.
    shift: Shift = 0
    #: Keep the graph: a second backward may follow.
    retain: bool = False


class Step(_Record, tag="step", frozen=True):
    """SGD on what has accumulated, then no gradients."""


class Reload(_Record, tag="reload", frozen=True):
    """Save the state, build the model anew, load, go on."""

    #: Instead, the model gets back the state that it began with, as after a loss that exploded.
    back: bool = False


class Switch(_Record, tag="switch", kw_only=True, frozen=True):
    """Regions opened from here on use another recipe; None leaves a setting as it is."""

    history: Annotated[int, Meta(ge=1, le=16)] | None = None
    algorithm: Algorithm | None = None
    margin: Annotated[int, Meta(ge=-4, le=4)] | None = None


Event = Open | Close | Forward | Backward | Step | Reload | Switch


def plain_training(steps: int, microbatches: int, mode: Mode) -> tuple[Event, ...]:
    """So many steps of so many microbatches, each backward right behind its forward. A single step
    is not taken: its gradients are all there is to see."""
    events: list[Event] = []
    for number in range(steps * microbatches):
        events.append(Forward(mode=mode))
        if mode == "train":
            events.append(Backward(of=(number,)))
            if steps > 1 and (number + 1) % microbatches == 0:
                events.append(Step())
    return tuple(events)


def numbered(events: Iterable[Event]) -> Iterator[tuple[int, Event]]:
    """Every event with how many of its kind came before it."""
    counts: dict[type, int] = {}
    for event in events:
        number = counts.get(type(event), 0)
        counts[type(event)] = number + 1
        yield number, event


def with_regions(events: Iterable[Event]) -> Iterator[tuple[Event, tuple[tuple[int, bool], ...]]]:
    """Every event with the regions that are open before it, outermost first: where each was opened,
    and whether it narrows."""
    regions: tuple[tuple[int, bool], ...] = ()
    for i, event in enumerate(events):
        yield event, regions
        if isinstance(event, Open):
            regions = (*regions, (i, event.enabled))
        elif isinstance(event, Close):
            regions = regions[:-1]


def narrows(event: Forward, regions: tuple[tuple[int, bool], ...]) -> bool:
    """Does a forward in these regions run in one that narrows?"""
    return event.inside or (bool(regions) and regions[-1][1])


def last_gradients(events: Iterable[Event]) -> tuple[int, ...]:
    """The forwards, by number, whose backwards have made the gradients that are left."""
    found: tuple[int, ...] = ()
    stepped = False
    for event in events:
        if isinstance(event, Backward):
            found = event.of if stepped else found + event.of
            stepped = False
        stepped = stepped or isinstance(event, Step)
    return found


class Settings(_Record, kw_only=True, frozen=True):
    """A recipe's settings, where it has any."""

    history: Annotated[int, Meta(ge=1, le=16)] = 4
    algorithm: Algorithm = "max"
    margin: Annotated[int, Meta(ge=-4, le=4)] = 0
    #: hybrid: E4M3 forward, E5M2 backward.
    format: Literal["hybrid", "e4m3"] = "hybrid"
    #: The library's bulk update kernel; False: its tensor by tensor path.
    fused: bool = True
    #: On ranks: maxima are shared by all of them, by the rank's own group of one, or by nobody.
    reduces: Literal["all", "own", "none"] = "all"


def switched(settings: Settings, event: Switch) -> Settings:
    """The settings after a switch."""
    changed = {
        name: value
        for name in ("history", "algorithm", "margin")
        if (value := getattr(event, name)) is not None
    }
    return msgspec.structs.replace(settings, **changed)


def with_settings(events: Iterable[Event], settings: Settings) -> Iterator[tuple[Event, Settings]]:
    """Every event with the settings that are in effect behind it."""
    for event in events:
        if isinstance(event, Switch):
            settings = switched(settings, event)
        yield event, settings
