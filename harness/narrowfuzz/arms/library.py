"""Runs a library's layers, event by event, and records a trace."""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from narrowfuzz.arms.event_records import see_cast, see_product
from narrowfuzz.arms.events_data import filled, of_rank, stimuli
from narrowfuzz.arms.frames import in_libraries
from narrowfuzz.arms.jobs import job_of_layers
from narrowfuzz.arms.lost import CannotRecord, raise_if_lost
from narrowfuzz.arms.tensors import host
from narrowfuzz.case.events import Backward, Reload, numbered
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.numerics.formats import F32, CastRounding
from narrowfuzz.play.job import Taps
from narrowfuzz.play.library import Called, Cast, by_event, play_layers
from narrowfuzz.play.player import Trace as Played
from narrowfuzz.play.player import leave
from narrowfuzz.recipe.stateful import Subject
from narrowfuzz.trace.snapshots import (
    CallSeen,
    CastSeen,
    ExecutionPoint,
    Moment,
    ProductSeen,
    SlotName,
)
from narrowfuzz.trace.trace import ErrorPhase, RunError, Trace, message_of

T = TypeVar("T")


def run_library(
    case: Case,
    subject: Subject,
    arm: str,
    *,
    checkpointed: bool,
    reset: bool = True,
    rank: int = 0,
) -> Trace:
    """The trace of the case, on a rank's rows. An exception of the library ends the run and becomes
    the trace's ``error``.

    ``checkpointed`` False runs the same events, with regions in the same places, and recomputes
    nothing. ``reset`` False does not clear the library's global state from earlier models of this
    process.
    """
    spec = case.spec
    if reset:
        subject.reset()
    job = job_of_layers(spec, subject.device, recomputed=checkpointed, caching=subject.caching)
    parameters: dict[str, nn.Parameter] = {}
    began: dict[str, F32] = {}

    def fill(layers: nn.ModuleDict) -> nn.ModuleDict:
        filled(layers, seed=case.data.seed)
        parameters.update(layers.named_parameters())
        if not spec.quantized_init:
            began.update({name: _values(p) for name, p in parameters.items()})
        return layers

    played, error = Played(), None
    tensors = of_rank(stimuli(case), rank)
    taps = Taps(listens=True, states=True, pending=True)
    try:
        play_layers(played, fill, tensors, subject=_verbs(subject, spec), job=job, taps=taps)
    except CannotRecord:
        raise
    except Exception as raised:
        raise_if_lost(raised, subject.device)
        run = played.training
        error = _error(raised, spec, -1 if run is None else run.event)
        if run is not None:
            with contextlib.suppress(Exception):  # what this raises is a consequence
                leave(run)
    moments = tuple(_moments(played, subject.gradient_rounding))
    sent = {
        (i, f): _values(tensors[f"grad_output@{number}/{f}"])
        for i, (number, event) in enumerate(numbered(spec.training))
        for f in (event.of if isinstance(event, Backward) and i < len(moments) else ())
    }
    return Trace(
        arm,
        {name: _values(x) for name, x in by_event(played.kept).items()},
        error=error,
        moments=moments,
        trained=frozenset(name for name, p in parameters.items() if p.requires_grad),
        parameters=began,
        sent=sent,
    )


def _verbs(subject: Subject, spec: Spec) -> Subject:
    """The subject with the Spec's layers; an error in reading the library's state becomes
    CannotRecord."""

    def read(verb: Callable[[], T]) -> T:
        try:
            return verb()
        except Exception as error:
            raise CannotRecord(
                f"the recipe {spec.recipe} cannot read the library's state"
            ) from error

    return replace(
        subject,
        layer=partial(subject.layer, spec),
        state=lambda layers: read(lambda: list(subject.state(layers))),
        pending=lambda: read(subject.pending),
    )


def _moments(played: Played, gradient_rounding: CastRounding) -> Iterator[Moment]:
    """The calls, casts and products of each completed event, and the state after it."""
    seen: defaultdict[int, list[CallSeen | CastSeen | ProductSeen]] = defaultdict(list)
    for event, where, one in (*played.calls, *played.recorded):
        if event < len(played.states):
            seen[event].append(_seen(ExecutionPoint(*where), one, gradient_rounding))
    for event, (state, pending) in enumerate(zip(played.states, played.pending, strict=True)):
        yield Moment(
            event=event,
            calls=tuple(one for one in seen[event] if isinstance(one, CallSeen)),
            casts=tuple(one for one in seen[event] if isinstance(one, CastSeen)),
            products=tuple(one for one in seen[event] if isinstance(one, ProductSeen)),
            state={
                SlotName(*name): Slot(np.float32(host(scale)), host(window))
                for name, (scale, window) in state.items()
            },
            pending=pending,
        )


def _seen(
    at: ExecutionPoint, one: Any, gradient_rounding: CastRounding
) -> CallSeen | CastSeen | ProductSeen:
    """A live call, cast or product as the record for a trace."""
    if isinstance(one, Called):
        return CallSeen(at, one.name)
    if isinstance(one, Cast):
        return see_cast(one, at, gradient_rounding)
    if at.phase == "backward" and one.role == "output":
        one = one._replace(role="gradient")  # the library gives all its products this role
    return see_product(one, at)


def _values(x: torch.Tensor) -> F32:
    return np.array(host(x.detach().float()), dtype=np.float32)


def _error(raised: Exception, spec: Spec, event: int) -> RunError:
    frames = traceback.extract_tb(raised.__traceback__)
    last = (in_libraries(list(frames)) or frames)[-1]
    module = last.filename.rsplit("/", 1)[-1].removesuffix(".py")
    return RunError(
        _phase(spec, event),
        type(raised).__name__,
        message_of(raised),
        f"{module}.{last.name}",
        event,
    )


def _phase(spec: Spec, event: int) -> ErrorPhase:
    if event < 0 or isinstance(spec.training[event], Reload):
        return "convert"
    return "backward" if isinstance(spec.training[event], Backward) else "forward"
