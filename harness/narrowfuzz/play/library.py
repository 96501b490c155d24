"""A library's own layers as the player takes them: how they are called, recomputed and listened to.

As in the player, every function is written to be specialised. ``subject`` holds a library's verbs:
layer(settings), autocast(settings), checkpoint(function, x, reentrant), backward(outputs, grads,
retain), listen(layers, hear) and load(layers, state).
"""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowfuzz.play.layers import in_backward
from narrowfuzz.play.player import Kept, Training

#: Where execution stands: in a phase of which forward's which layer call; -1: outside any.
Where = namedtuple("Where", "phase of call", defaults=(-1, -1))
#: One call of a layer.
Called = namedtuple("Called", "name")
#: A recipe's settings.
Settings = namedtuple("Settings", "history algorithm margin format fused reduces")
#: One tensor quantised: the (layer, direction, index) of its state, None where none is known.
Cast = namedtuple("Cast", "slot input codes scale format")
#: One operand of a product: codes, or values where 1 / scale is None.
Side = namedtuple("Side", "codes inverse format")
#: One product of two operands.
Product = namedtuple("Product", "role a b")


def training_of(
    layers: nn.ModuleDict,
    *,
    hows: Mapping[int, Mapping[str, Any]],
    subject: Any,
    happens: tuple[str, ...],
    order: tuple[str, ...],
    layout: str,
    frozen: bool,
    checkpointed: bool,
    each: bool,
    whole: bool,
    by: str,
    reentrant: bool,
    caching: bool,
    listens: bool,
) -> Training:
    """A training of these layers. ``hows`` says how each forward calls them, ``order`` which of
    them it calls; a checkpoint wraps ``each`` of them, the ``whole``, both or nothing."""
    run = Training(layers)
    run.call = lambda x: through(
        run, x, subject=subject, order=order, layout=layout, checkpointed=checkpointed, each=each,
        whole=whole, by=by, reentrant=reentrant, caching=caching, listens=listens,
        **(hows[run.forward] if hows else {}),
    )  # fmt: skip
    run.backward = lambda outputs, grads, retain: backward_of(
        run, outputs, grads, retain, subject=subject, listens=listens
    )
    if "open" in happens:
        run.region = subject.autocast
    if "reload" in happens:
        run.anew = lambda settings: built(settings, subject=subject, order=order, frozen=frozen)
        run.prepare, run.load = lambda: None, subject.load
    return run


def built(settings: Any, *, subject: Any, order: tuple[str, ...], frozen: bool) -> nn.ModuleDict:
    """The model's layers, by name."""
    layers = nn.ModuleDict({name: subject.layer(settings) for name in dict.fromkeys(order)})
    if frozen:
        layers["0"].requires_grad_(False)
    return layers


def through(
    run: Training,
    x: Any,
    *,
    inside: Any,
    first: bool | None,
    path: int,
    subject: Any,
    order: tuple[str, ...],
    layout: str,
    checkpointed: bool,
    each: bool,
    whole: bool,
    by: str,
    reentrant: bool,
    caching: bool,
    listens: bool,
) -> Any:
    """What the layers make of an input. ``inside`` holds the settings of a region that this forward
    opens for itself, inside of what is recomputed; ``first`` says whether weights are kept or taken
    as they were kept, ``path`` which branch runs."""
    number, trains = run.forward, torch.is_grad_enabled()

    def call(index: int, name: str, x: Any) -> Any:
        def one(x: Any) -> Any:
            if listens:
                run.at.append(Where("recompute" if in_backward() else "forward", number, index))
                run.hear(run.at[-1], Called(name))
            try:
                if caching:
                    return run.model[name](x, is_first_microbatch=first)
                return run.model[name](x)
            finally:
                if listens:
                    run.at.pop()

        if each:
            return wrapped(
                one, x, inside, trains, subject=subject, checkpointed=checkpointed, by=by,
                reentrant=reentrant,
            )  # fmt: skip
        return one(x)

    def model(x: Any) -> Any:
        if layout == "branch":
            return call(0, order[path], x)
        if layout == "dangling":
            call(0, order[0], x)
            return call(1, order[1], x)
        for index, name in enumerate(order):
            x = call(index, name, x)
        return x

    with hearing(run, subject=subject, listens=listens):
        if whole or (inside is not None and not each):
            return wrapped(
                model, x, None if each else inside, whole and trains, subject=subject,
                checkpointed=checkpointed, by=by, reentrant=reentrant,
            )  # fmt: skip
        return model(x)


def wrapped(
    function: Callable[[Any], Any],
    x: Any,
    settings: Any,
    trains: bool,
    *,
    subject: Any,
    checkpointed: bool,
    by: str,
    reentrant: bool,
) -> Any:
    """``function(x)`` in a region of its own, unless its settings are None, and recomputed in
    backward if it is ``checkpointed`` and ``trains``."""

    def region(x: Any) -> Any:
        with contextlib.nullcontext() if settings is None else subject.autocast(settings):
            return function(x)

    if not (checkpointed and trains):
        return region(x)
    if by == "torch":
        return torch_checkpoint(region, x, use_reentrant=reentrant)
    return subject.checkpoint(region, x, reentrant)


def backward_of(
    run: Training,
    outputs: list[Any],
    grads: list[Any],
    retain: bool,
    *,
    subject: Any,
    listens: bool,
) -> None:
    """The library's own backward."""
    with hearing(run, subject=subject, listens=listens):
        subject.backward(outputs, grads, retain)


def hearing(run: Training, *, subject: Any, listens: bool) -> Any:
    """Tells ``run.hear`` of what passes."""
    if not listens:
        return contextlib.nullcontext()

    def hear(seen: Any) -> None:
        outside = Where("backward" if in_backward() else "forward")
        run.hear(run.at[-1] if run.at else outside, seen)

    return subject.listen(run.model, hear)


def by_event(kept: Iterable[Kept]) -> dict[str, torch.Tensor]:
    """Results by name: y<forward>, x<forward>.grad@<event> and <parameter>.grad@<event>, in fp32 on
    the CPU."""
    found = {}
    for name, forward, event, t in kept:
        place = {"output": f"y{forward}", "grad_input": f"x{forward}.grad@{event}"}
        found[place.get(name, f"{name}@{event}")] = on_host(t)
    return found


def on_host(t: torch.Tensor) -> torch.Tensor:
    """A copy in fp32, on the CPU."""
    return t.detach().float().cpu().clone()
