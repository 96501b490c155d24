"""How the player handles a library's own layers: how they are called, recomputed and recorded.

Scripts contain the source of these functions, with the values of a job substituted. ``subject``
holds a library's operations: layer(settings), autocast(settings), checkpoint(function, x,
reentrant), backward(outputs, grads, retain), listen(layers, record) and load(layers, state).
"""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowfuzz.play.job import Event, Taps
from narrowfuzz.play.layers import in_backward
from narrowfuzz.play.player import Kept, Trace, Training, leave, train

#: The position of execution: its phase, the forward's number, the layer call's index; -1: none.
Where = namedtuple("Where", "phase of call", defaults=(-1, -1))
#: One call of a layer.
Called = namedtuple("Called", "name")
#: A recipe's settings.
Settings = namedtuple("Settings", "history algorithm margin format fused reduces")
#: One quantised tensor; its slot is the (layer, direction, index) of its state, None if unknown.
Cast = namedtuple("Cast", "slot input codes scale format")
#: One operand of a product: codes and 1 / scale, or values where ``inverse`` is None.
Side = namedtuple("Side", "codes inverse format")
#: One product of two operands.
Product = namedtuple("Product", "role a b")


def play_layers(
    trace: Trace,
    fill: Callable[[Any], Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    subject: Any,
    job: Any,
    taps: Taps,
) -> Trace:
    """Train a model of a library's layers, whose parameters ``fill`` sets, through all events.
    ``recorded`` gets (event, where, cast or product), ``calls`` (event, where, call), ``states``
    the scale and the amax window of every slot after each event, ``pending`` the library's
    temporary buffers then; ``began`` gets the initial parameters."""
    torch.manual_seed(0)  # quantising the initial values puts their maximum into the state
    run = trace.training = training_of(
        fill(built(job.layers.settings, subject=subject, job=job)),
        subject=subject,
        job=job,
        taps=taps,
    )
    if taps.begins:
        trace.began = {name: on_host(p) for name, p in run.model.named_parameters()}

    def record(where: Any, seen: Any) -> None:
        (trace.calls if type(seen) is Called else trace.recorded).append(
            (run.event, where, copied(seen))
        )

    if taps.listens:
        run.record = record
    train(
        trace,
        run,
        tensors,
        # a script's events stand in a variable of this name
        noting(trace, run, job.events, subject=subject, taps=taps)
        if taps.states or taps.pending
        else job.events,
        job=job,
        taps=taps,
    )
    leave(run)
    trace.training = None  # ranks send each other their traces
    if taps.keeps:
        trace.results = by_event(trace.kept)
    return trace


def noting(
    trace: Trace, run: Training, events: Iterable[Event], *, subject: Any, taps: Taps
) -> Iterator[Event]:
    """The events; after each of them the library's state is recorded."""
    for event in events:
        yield event
        if taps.states:
            trace.states.append(
                {slot: (s.clone(), window.clone()) for slot, s, window in subject.state(run.model)}
            )
        if taps.pending:
            trace.pending.append(subject.pending())


def copied(t: Any) -> Any:
    """The same with copies of its tensors, which may change later."""
    if isinstance(t, tuple):
        return type(t)(*map(copied, t)) if hasattr(t, "_fields") else t
    return t.detach().clone() if isinstance(t, torch.Tensor) else t


def training_of(layers: nn.ModuleDict, *, subject: Any, job: Any, taps: Taps) -> Training:
    """A training of these layers."""
    run = Training(layers, (job.input_shape, job.output_shape))
    run.call = lambda x: through(
        run,
        x,
        subject=subject,
        job=job,
        taps=taps,
        **(job.layers.hows[run.forward] if job.layers.hows else {}),
    )
    run.backward = lambda outputs, grads, retain: backward_of(
        run, outputs, grads, retain, subject=subject, taps=taps
    )
    if "open" in job.happens:
        run.region = subject.autocast
    if "reload" in job.happens:
        run.anew = lambda settings: built(settings, subject=subject, job=job)
        run.prepare, run.load = lambda: None, subject.load
    return run


def built(settings: Any, *, subject: Any, job: Any) -> nn.ModuleDict:
    """The model's layers, by name."""
    layers = nn.ModuleDict({n: subject.layer(settings) for n in dict.fromkeys(job.layers.order)})
    if job.layers.frozen:
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
    job: Any,
    taps: Taps,
) -> Any:
    """The output of the layers for an input. ``inside`` holds the settings of a region that this
    forward opens itself, inside what is recomputed; ``first`` is is_first_microbatch: True caches
    weights, False uses cached ones; ``path`` is the branch that runs."""
    number, trains = run.forward, torch.is_grad_enabled()

    def call(index: int, name: str, x: Any) -> Any:
        def one(x: Any) -> Any:
            if taps.listens:
                run.at.append(Where("recompute" if in_backward() else "forward", number, index))
                run.record(run.at[-1], Called(name))
            try:
                if job.layers.caching:
                    return run.model[name](x, is_first_microbatch=first)
                return run.model[name](x)
            finally:
                if taps.listens:
                    run.at.pop()

        if job.layers.each:
            return wrapped(one, x, inside, trains, subject=subject, job=job)
        return one(x)

    def model(x: Any) -> Any:
        if job.layers.layout == "branch":
            return call(0, job.layers.order[path], x)
        if job.layers.layout == "dangling":
            call(0, job.layers.order[0], x)
            return call(1, job.layers.order[1], x)
        for index, name in enumerate(job.layers.order):
            x = call(index, name, x)
        return x

    with recording(run, subject=subject, taps=taps):
        if job.layers.whole or (inside is not None and not job.layers.each):
            return wrapped(
                model,
                x,
                None if job.layers.each else inside,
                job.layers.whole and trains,
                subject=subject,
                job=job,
            )
        return model(x)


def wrapped(
    function: Callable[[Any], Any], x: Any, settings: Any, trains: bool, *, subject: Any, job: Any
) -> Any:
    """``function(x)`` in a region of its own, unless its settings are None, and recomputed in
    backward if the layers are and it ``trains``."""

    def region(x: Any) -> Any:
        with contextlib.nullcontext() if settings is None else subject.autocast(settings):
            return function(x)

    if not (job.layers.recomputed and trains):
        return region(x)
    if job.layers.by == "torch":
        return torch_checkpoint(region, x, use_reentrant=job.layers.reentrant)
    return subject.checkpoint(region, x, job.layers.reentrant)


def backward_of(
    run: Training, outputs: list[Any], grads: list[Any], retain: bool, *, subject: Any, taps: Taps
) -> None:
    """Run the library's own backward."""
    with recording(run, subject=subject, taps=taps):
        subject.backward(outputs, grads, retain)


def recording(run: Training, *, subject: Any, taps: Taps) -> Any:
    """A context in which ``run.record`` gets every cast and product, if any are recorded."""
    if not taps.listens:
        return contextlib.nullcontext()

    def record(seen: Any) -> None:
        outside = Where("backward" if in_backward() else "forward")
        run.record(run.at[-1] if run.at else outside, seen)

    return subject.listen(run.model, record)


def by_event(results: Iterable[Kept]) -> dict[str, torch.Tensor]:
    """Results by name: y<forward>, x<forward>.grad@<event> and <parameter>.grad@<event>, in fp32 on
    the CPU."""
    found = {}
    for name, forward, event, t in results:
        place = {"output": f"y{forward}", "grad_input": f"x{forward}.grad@{event}"}
        found[place.get(name, f"{name}@{event}")] = on_host(t)
    return found


def on_host(t: torch.Tensor) -> torch.Tensor:
    """A copy in fp32, on the CPU."""
    return t.detach().float().cpu().clone()
