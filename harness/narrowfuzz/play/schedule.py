"""Plays a schedule on a library's layers, event by event: a training as its user writes it.

As in the player of models, every function is written to be specialised. ``subject`` holds a
library's verbs: layer(settings), autocast(settings), checkpoint(function, x, reentrant),
backward(outputs, grads, retain), listen(layers, hear) and load(layers, state).
"""

from __future__ import annotations

import contextlib
import io
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

#: Where execution stands: in a phase of which forward's which layer call; -1: outside any.
Where = namedtuple("Where", "phase of call", defaults=(-1, -1))
#: The phase of a layer's call, by the training's.
PHASES = {"forward": "forward", "backward": "recompute"}
#: One call of a layer.
Called = namedtuple("Called", "name")
#: A recipe's settings.
Settings = namedtuple("Settings", "history algorithm margin format fused")
#: One tensor quantised: the (layer, direction, index) of its state, None where none is known.
Cast = namedtuple("Cast", "slot input codes scale format")
#: One operand of a product: codes, or values where 1 / scale is None.
Side = namedtuple("Side", "codes inverse format")
#: One product of two operands.
Product = namedtuple("Product", "role a b")

#: ("open", settings) and ("close",): a region, in high precision under None. ("forward", number,
#: {how it differs from the others}). ("backward", number, of, retain). ("step",).
#: ("reload", settings). ("switch",): what follows says its settings itself.
Event = tuple[Any, ...]


@dataclass
class Training:
    """A schedule as far as it is played. Results are y<forward>, x<forward>.grad@<event> and
    <parameter>.grad@<event>; ``hear`` is told of every cast, product and call of a layer, and where
    it happened. Whoever watches may keep what was ``heard``, ``states``, what was ``left`` and
    the parameters that it ``began`` with."""

    layers: Any
    tensors: Any
    event: int = -1
    live: dict[int, Any] = field(default_factory=dict)
    hear: Any = None
    phase: str = "forward"
    at: list[Any] = field(default_factory=list)
    regions: list[Any] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    heard: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    began: dict[str, Any] = field(default_factory=dict)


def train(
    run: Training,
    events: Sequence[Event],
    after: Callable[[Training], None],
    *,
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
    keeps: bool,
    rate: float,
) -> None:
    """Every event in order, and ``after`` each of them. ``happens`` holds the kinds of events,
    ``order`` the layers of one forward; a checkpoint wraps ``each`` of them, the ``whole``, both or
    nothing; ``keeps`` says whether results are kept."""
    for run.event, (kind, *how) in enumerate(events):
        if "open" in happens and kind == "open":
            run.regions.append(contextlib.ExitStack())
            run.regions[-1].enter_context(subject.autocast(how[0]))
        if "close" in happens and kind == "close":
            run.regions.pop().close()
        if "forward" in happens and kind == "forward":
            forward(
                run, how[0], subject=subject, order=order, layout=layout, frozen=frozen,
                checkpointed=checkpointed, each=each, whole=whole, by=by, reentrant=reentrant,
                caching=caching, listens=listens, keeps=keeps, **how[1],
            )  # fmt: skip
        if "backward" in happens and kind == "backward":
            backward(run, *how, subject=subject, listens=listens, keeps=keeps)
        if "step" in happens and kind == "step":
            step(run, keeps=keeps, rate=rate)
        if "reload" in happens and kind == "reload":
            torch.save(run.layers.state_dict(), file := io.BytesIO())
            file.seek(0)
            run.layers = built(how[0], subject=subject, order=order, frozen=frozen)
            subject.load(run.layers, torch.load(file, weights_only=False))
        after(run)


def built(settings: Any, *, subject: Any, order: tuple[str, ...], frozen: bool) -> nn.ModuleDict:
    """The model's layers, by name."""
    layers = nn.ModuleDict({name: subject.layer(settings) for name in dict.fromkeys(order)})
    if frozen:
        layers["0"].requires_grad_(False)
    return layers


def forward(
    run: Training,
    number: int,
    *,
    mode: str,
    inside: Any,
    first: bool | None,
    path: int,
    subject: Any,
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
    keeps: bool,
) -> None:
    """Run the model on an input of its own, with ``mode`` train on a graph. ``inside`` holds the
    settings of a region that it opens for itself, inside of what is recomputed."""

    def call(index: int, name: str, x: Any) -> Any:
        def one(x: Any) -> Any:
            if listens:
                run.at.append(Where(PHASES[run.phase], number, index))
                run.hear(run.at[-1], Called(name))
            try:
                if caching:
                    return run.layers[name](x, is_first_microbatch=first)
                return run.layers[name](x)
            finally:
                if listens:
                    run.at.pop()

        if each:
            again = checkpointed and mode == "train"
            return wrapped(one, x, inside, again, subject=subject, by=by, reentrant=reentrant)
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

    x = run.tensors[f"x{number}"].to(next(run.layers.parameters()).device, copy=True)
    if not frozen:
        x.requires_grad_(mode == "train")
    if mode != "train":
        run.layers.train(mode != "eval")
    with hearing(run, subject=subject, listens=listens), torch.set_grad_enabled(mode == "train"):
        if whole or (inside is not None and not each):
            again = whole and checkpointed and mode == "train"
            settings = None if each else inside
            y = wrapped(model, x, settings, again, subject=subject, by=by, reentrant=reentrant)
        else:
            y = model(x)
    if keeps:
        run.results[f"y{number}"] = kept(y)
    if mode == "train":
        run.live[number] = (x, y)
    else:
        run.layers.train(True)


def wrapped(
    function: Callable[[Any], Any],
    x: Any,
    settings: Any,
    again: bool,
    *,
    subject: Any,
    by: str,
    reentrant: bool,
) -> Any:
    """``function(x)`` in a region of its own, unless its settings are None, and recomputed in
    backward if it runs ``again``."""

    def region(x: Any) -> Any:
        with contextlib.nullcontext() if settings is None else subject.autocast(settings):
            return function(x)

    if not again:
        return region(x)
    if by == "torch":
        return torch_checkpoint(region, x, use_reentrant=reentrant)
    return subject.checkpoint(region, x, reentrant)


def backward(
    run: Training,
    number: int,
    of: tuple[int, ...],
    retain: bool,
    *,
    subject: Any,
    listens: bool,
    keeps: bool,
) -> None:
    """One backward through the outputs of these forwards, each with a gradient of its own."""
    outputs = [run.live[f][1] for f in of]
    grads = [run.tensors[f"g{number}/{f}"].to(y) for f, y in zip(of, outputs, strict=True)]
    run.phase = "backward"
    try:
        with hearing(run, subject=subject, listens=listens):
            subject.backward(outputs, grads, retain)
    finally:
        run.phase = "forward"
    for f in of:
        x = run.live[f][0] if retain else run.live.pop(f)[0]
        if keeps and x.grad is not None:
            run.results[f"x{f}.grad@{run.event}"] = kept(x.grad)
        x.grad = None


def step(run: Training, *, keeps: bool, rate: float) -> None:
    """SGD on what has accumulated, then no gradients."""
    with torch.no_grad():
        for name, p in run.layers.named_parameters():
            if p.grad is not None:
                if keeps:
                    run.results[f"{name}.grad@{run.event}"] = kept(p.grad)
                p.add_(p.grad, alpha=-rate)
                p.grad = None


def hearing(run: Training, *, subject: Any, listens: bool) -> Any:
    """Tells ``run.hear`` of what passes."""
    if not listens:
        return contextlib.nullcontext()
    return subject.listen(
        run.layers, lambda seen: run.hear(run.at[-1] if run.at else Where(run.phase), seen)
    )


def kept(t: torch.Tensor) -> torch.Tensor:
    """A copy in fp32, on the CPU."""
    return t.detach().float().cpu().clone()
