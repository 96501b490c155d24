"""The events of a training: plain records, strict JSON inside a case.

A training can open and close an autocast region, run a forward, run backward through one or several
forwards, step the optimizer, save and load, and switch the recipe. Forwards are numbered in their
order: the first Forward event is number 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

#: Contents of a tensor: ordinary values, zeros, one element of 2^12 times the largest, or one
#: infinity.
Stimulus = Literal["gaussian", "zero", "spike", "inf"]
#: ``train`` builds a graph; ``no_grad`` and ``inference`` run in training mode without a graph;
#: ``eval`` runs in evaluation mode without one.
Mode = Literal["train", "no_grad", "eval", "inference"]
Shift = Annotated[int, Meta(ge=-24, le=24)]
Algorithm = Literal["max", "most_recent", "callable"]
#: How a model is made of a library's layers. chain: one after the other. twice: one layer called
#: twice. frozen_first: two layers, of which the first has no gradients and an input that needs
#: none. dangling: two side by side, the first of which reaches no loss. branch: two, of which each
#: forward runs one.
Layout = Literal["chain", "twice", "frozen_first", "dangling", "branch"]
#: Which part of the model a checkpoint wraps; ``nested`` wraps each layer inside the whole.
Wraps = Literal["whole", "each", "nested"]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a case file: unknown fields are refused, and defaults are omitted."""


class Open(_Record, tag="open", frozen=True):
    """Enter an autocast region, nested if another one is open."""

    enabled: bool = True


class Close(_Record, tag="close", frozen=True):
    """Leave the innermost open region."""


class Forward(_Record, tag="forward", kw_only=True, frozen=True):
    """Run the model on a fresh input."""

    mode: Mode = "train"
    values: Stimulus = "gaussian"
    #: The input is multiplied by 2^shift.
    shift: Shift = 0
    #: Open a region of its own, inside whatever is checkpointed.
    inside: bool = False
    #: Weight caching (is_first_microbatch): True casts and caches the weights, False reuses the
    #: cached ones, None does neither.
    first: bool | None = None
    #: The branch that runs (layout ``branch``).
    path: Literal[0, 1] = 0


class Backward(_Record, tag="backward", kw_only=True, frozen=True):
    """One backward through the sum of these forwards' losses, each with its own output gradient."""

    #: Numbers of the forwards.
    of: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4)]
    values: Stimulus = "gaussian"
    #: Output gradients are multiplied by 2^shift.
    shift: Shift = 0
    #: Keep the graph: a second backward may follow.
    retain: bool = False


class Step(_Record, tag="step", frozen=True):
    """The optimizer steps on the accumulated gradients, which are then cleared."""


class Reload(_Record, tag="reload", frozen=True):
    """Save the state, build a new model, load the state into it, continue with that."""

    #: Instead, reset the model to its initial state, as a user would after a loss exploded.
    back: bool = False


class Switch(_Record, tag="switch", kw_only=True, frozen=True):
    """Change the recipe of the regions that are opened from here on; None keeps a setting."""

    history: Annotated[int, Meta(ge=1, le=16)] | None = None
    algorithm: Algorithm | None = None
    margin: Annotated[int, Meta(ge=-4, le=4)] | None = None


Event = Open | Close | Forward | Backward | Step | Reload | Switch


def plain_training(steps: int, microbatches: int, mode: Mode) -> tuple[Event, ...]:
    """Events of ``steps`` optimizer steps with ``microbatches`` each, every backward directly after
    its forward. With one step there is no Step event: only the gradients are of interest."""
    events: list[Event] = []
    for number in range(steps * microbatches):
        events.append(Forward(mode=mode))
        if mode == "train":
            events.append(Backward(of=(number,)))
            if steps > 1 and (number + 1) % microbatches == 0:
                events.append(Step())
    return tuple(events)


def numbered(events: Iterable[Event]) -> Iterator[tuple[int, Event]]:
    """Yield (number of earlier events of the same type, event)."""
    counts: dict[type, int] = {}
    for event in events:
        number = counts.get(type(event), 0)
        counts[type(event)] = number + 1
        yield number, event


def with_regions(events: Iterable[Event]) -> Iterator[tuple[Event, tuple[tuple[int, bool], ...]]]:
    """Yield every event with the regions that are open before it, outermost first, each as (index
    of its Open, whether it is enabled)."""
    regions: tuple[tuple[int, bool], ...] = ()
    for i, event in enumerate(events):
        yield event, regions
        if isinstance(event, Open):
            regions = (*regions, (i, event.enabled))
        elif isinstance(event, Close):
            regions = regions[:-1]


def narrows(event: Forward, regions: tuple[tuple[int, bool], ...]) -> bool:
    """True if a forward in these regions runs in narrow precision: the innermost is enabled, or the
    forward opens its own."""
    return event.inside or (bool(regions) and regions[-1][1])


def last_gradients(events: Iterable[Event]) -> tuple[int, ...]:
    """Numbers of the forwards whose backwards accumulated the gradients since the last step, or if
    there are none since, the gradients of that step."""
    found: tuple[int, ...] = ()
    stepped = False
    for event in events:
        if isinstance(event, Backward):
            found = event.of if stepped else found + event.of
            stepped = False
        stepped = stepped or isinstance(event, Step)
    return found


class Settings(_Record, kw_only=True, frozen=True):
    """Settings of a recipe for a library's own layers; most of them apply only to delayed
    scaling."""

    history: Annotated[int, Meta(ge=1, le=16)] = 4
    algorithm: Algorithm = "max"
    margin: Annotated[int, Meta(ge=-4, le=4)] = 0
    #: hybrid: E4M3 forward, E5M2 backward.
    format: Literal["hybrid", "e4m3"] = "hybrid"
    #: True: the library's fused scale update; False: its tensor by tensor update.
    fused: bool = True
    #: On ranks: amaxes are reduced over all ranks, over a group of one rank each, or not at all.
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
    """Yield every event with the settings that are in effect after it."""
    for event in events:
        if isinstance(event, Switch):
            settings = switched(settings, event)
        yield event, settings
