"""Run a library's layers, event by event, and write down what happened."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from narrowfuzz.arms.events_data import filled, of_rank, stimuli
from narrowfuzz.arms.frames import in_libraries
from narrowfuzz.arms.jobs import job_of_layers, plain
from narrowfuzz.arms.lost import raise_if_lost
from narrowfuzz.arms.seen import see_cast, see_product
from narrowfuzz.arms.tensors import host
from narrowfuzz.case.events import Backward, Reload, numbered
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play import library, player
from narrowfuzz.play.job import Job, Taps
from narrowfuzz.recipe.stateful import Subject
from narrowfuzz.trace.snapshots import At, CallSeen, CastSeen, Moment, ProductSeen, SlotName
from narrowfuzz.trace.trace import ErrorPhase, RunError, Trace, message_of


def run_library(
    case: Case,
    subject: Subject,
    arm: str,
    *,
    checkpointed: bool,
    reset: bool = True,
    rank: int = 0,
) -> Trace:
    """The trace of the case, on a rank's rows. What the library raises ends it and is its
    ``error``.

    ``checkpointed`` False runs the same events, with regions in the same places, and recomputes
    nothing. ``reset`` False leaves what earlier models of this process left behind.
    """
    spec = case.spec
    if reset:
        subject.reset()
    written = _Written(subject)
    job = job_of_layers(spec, "cpu", recomputed=checkpointed, caching=subject.caching)
    try:
        layers = _begun(case, subject, job)
    except Exception as raised:
        return Trace(arm, error=_error(raised, spec, -1))
    device = next(layers.parameters()).device.type
    job, taps = replace(job, device=device), Taps(listens=True)
    run = library.training_of(layers, subject=_verbs(subject, spec), job=job, taps=taps)
    run.record, played = written.record, player.Trace()
    tensors = of_rank(stimuli(case), rank)
    plainly = {} if spec.quantized_init else dict(layers.named_parameters())
    began = {name: _values(p) for name, p in plainly.items()}
    error = None
    try:
        events = written.after_each(run, job.events)
        player.train(played, run, tensors, events, job=job, taps=taps)
    except Exception as raised:
        raise_if_lost(raised, device)
        if written.writing:  # not the library's
            raise
        error = _error(raised, spec, run.event)
    trained = frozenset(n for n, p in run.model.named_parameters() if p.requires_grad)
    try:
        player.leave(run)
    except Exception as raised:  # after another error it is that one's consequence
        error = error or _error(raised, spec, run.event)
    results = library.by_event(played.kept)
    sent = {
        (i, f): _values(tensors[f"grad_output@{number}/{f}"])
        for i, (number, event) in enumerate(numbered(spec.training))
        for f in (event.of if isinstance(event, Backward) and i < len(written.moments) else ())
    }
    return Trace(
        arm,
        {name: _values(x) for name, x in results.items()},
        error=error,
        moments=tuple(written.moments),
        trained=trained,
        parameters=began,
        sent=sent,
    )


def _begun(case: Case, subject: Subject, job: Job) -> nn.ModuleDict:
    """The layers with their parameters, before the first event."""
    spec = case.spec
    # initial values are overwritten, but quantising them has left their maximum in the state
    torch.manual_seed(0)
    layers = library.built(plain(spec.settings), subject=_verbs(subject, spec), job=job)
    return filled(layers, seed=case.data.seed)  # type: ignore[no-any-return]


def _verbs(subject: Subject, spec: Spec) -> Subject:
    """The subject, whose layers are the Spec's."""
    return replace(subject, layer=partial(subject.layer, spec))


@dataclass
class _Written:
    """What is written down while a training is played."""

    subject: Subject
    #: True while it writes: an error is a recipe's, or ours.
    writing: bool = False
    moments: list[Moment] = field(default_factory=list)
    calls: list[CallSeen] = field(default_factory=list)
    casts: list[CastSeen] = field(default_factory=list)
    products: list[ProductSeen] = field(default_factory=list)

    def record(self, where: Any, seen: Any) -> None:
        """A call, a cast or a product, as it happens."""
        at = At(*where)
        if isinstance(seen, library.Called):
            self.calls.append(CallSeen(at, seen.name))
            return
        if isinstance(seen, library.Cast):
            self.casts.append(see_cast(seen, at))
            return
        if at.phase == "backward" and seen.role == "output":
            seen = seen._replace(role="gradient")  # where all products are called alike
        self.products.append(see_product(seen, at))

    def after_each(
        self, run: player.Training, events: Iterable[player.Event]
    ) -> Iterator[player.Event]:
        """The events, and behind each of them how things stand."""
        for event in events:
            yield event
            self.writing = True
            state = {
                SlotName(*name): Slot(np.float32(host(scale)), host(window).copy())
                for name, scale, window in self.subject.state(run.model)
            }
            self.moments.append(
                Moment(
                    event=run.event,
                    calls=tuple(self.calls),
                    casts=tuple(self.casts),
                    products=tuple(self.products),
                    state=state,
                    pending=self.subject.pending(),
                )
            )
            self.calls, self.casts, self.products = [], [], []
            self.writing = False


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
        "".join(traceback.format_exception(raised))[-4000:],
        event,
    )


def _phase(spec: Spec, event: int) -> ErrorPhase:
    if event < 0 or isinstance(spec.training[event], Reload):
        return "convert"
    return "backward" if isinstance(spec.training[event], Backward) else "forward"
