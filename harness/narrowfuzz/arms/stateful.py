"""Run a schedule on a subject, event by event, and write down what happened.

The model is composed here from the subject's layers, so that every library runs the same shapes of
model; the events are the library's own calls.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowfuzz.arms.events_data import fill, gradient, model_input
from narrowfuzz.arms.frames import in_libraries
from narrowfuzz.arms.seen import see_cast, see_product
from narrowfuzz.case import LEARNING_RATE, Case
from narrowfuzz.numerics.formats import F32
from narrowfuzz.schedule.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Schedule,
    Settings,
    Step,
    Switch,
)
from narrowfuzz.schedule.trace import (
    At,
    CallSeen,
    CastSeen,
    Moment,
    ProductSeen,
    ScheduleError,
    StateTrace,
)
from narrowfuzz.stateful import RawCast, RawProduct, Subject


def run_schedule(
    case: Case, subject: Subject, arm: str, *, checkpointed: bool, reset: bool = True
) -> StateTrace:
    """The trace of the case's schedule. What the library raises ends it and is its ``error``.

    ``checkpointed`` False runs the same events, with regions in the same places, and recomputes
    nothing. ``reset`` False leaves what earlier models of this process left behind.
    """
    assert case.spec.schedule is not None
    if reset:
        subject.reset()
    moments: list[Moment] = []
    error = None
    try:
        run = _Run(case, subject, case.spec.schedule, checkpointed)
    except Exception as raised:
        return StateTrace(arm, error=_error(raised, -1))
    for i, event in enumerate(run.schedule.events):
        run.begin(i)
        try:
            run.do(event)
        except Exception as raised:
            error = _error(raised, i)
            break
        moments.append(run.moment())
    try:
        run.regions.close()
    except Exception as raised:  # after another error it is that one's consequence
        error = error or _error(raised, run.event)
    trained = frozenset(n for n, p in run.layers.named_parameters() if p.requires_grad)
    return StateTrace(arm, tuple(moments), run.outputs, error, trained, run.parameters, run.sent)


@dataclass
class _Run:
    case: Case
    subject: Subject
    schedule: Schedule
    checkpointed: bool
    regions: ExitStack = field(default_factory=ExitStack)
    settings: Settings = field(init=False)
    layers: nn.ModuleDict = field(init=False)
    #: Open regions, innermost last; each leaves its own ExitStack.
    stacks: list[ExitStack] = field(default_factory=list)
    #: Forward -> (its input, its output).
    live: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    forwards: int = 0
    backwards: int = 0
    outputs: dict[str, F32] = field(default_factory=dict)
    parameters: dict[str, F32] = field(init=False)
    sent: dict[tuple[int, int], F32] = field(default_factory=dict)
    #: Where execution stands.
    event: int = 0
    backward: bool = False
    at: list[At] = field(default_factory=list)
    calls: list[CallSeen] = field(default_factory=list)
    casts: list[CastSeen] = field(default_factory=list)
    products: list[ProductSeen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = self.schedule.settings
        # initial values are overwritten, but quantising them has left their maximum in the state
        torch.manual_seed(0)
        self.layers = self._build()
        fill(self.layers, self.case.data)
        plain = not self.schedule.quantized_init
        named = self.layers.named_parameters() if plain else ()
        self.parameters = {name: _values(p) for name, p in named}

    def _build(self) -> nn.ModuleDict:
        spec = msgspec.structs.replace(
            self.case.spec,
            schedule=msgspec.structs.replace(self.schedule, settings=self.settings),
        )
        made = {str(i): self.subject.layer(spec) for i in range(self.schedule.layers)}
        if self.schedule.layout == "frozen_first":
            made["0"].requires_grad_(False)
        return nn.ModuleDict(made)

    def begin(self, event: int) -> None:
        self.event = event
        self.calls, self.casts, self.products = [], [], []

    def moment(self) -> Moment:
        return Moment(
            event=self.event,
            calls=tuple(self.calls),
            casts=tuple(self.casts),
            products=tuple(self.products),
            state=self.subject.state(dict(self.layers.items())),
            pending=self.subject.pending(),
        )

    def do(self, event: Event) -> None:
        match event:
            case Open(enabled=enabled):
                stack = ExitStack()
                stack.enter_context(self.subject.autocast(self.settings if enabled else None))
                self.stacks.append(stack)
                self.regions.callback(stack.close)
            case Close():
                self.stacks.pop().close()
            case Forward():
                self._forward(event)
            case Backward():
                self._backward(event)
            case Step():
                self._step()
            case Reload():
                self._reload()
            case Switch():
                told = {
                    name: value
                    for name in ("history", "algorithm", "margin")
                    if (value := getattr(event, name)) is not None
                }
                self.settings = msgspec.structs.replace(self.settings, **told)

    def _forward(self, event: Forward) -> None:
        number, self.forwards = self.forwards, self.forwards + 1
        x = model_input(self.case, number, event)
        trains = event.mode == "train"
        if trains and self.schedule.layout != "frozen_first":
            x.requires_grad_(True)
        self.layers.train(event.mode != "eval")
        grad = nullcontext() if trains else torch.no_grad()
        with grad, self._listening():
            y = _model(self, event, number, again=trains and self.checkpointed)(x)
        self.layers.train(True)
        self.outputs[f"y{number}"] = _values(y)
        if trains:
            self.live[number] = (x, y)

    def _backward(self, event: Backward) -> None:
        pairs = [self.live[f] for f in event.of]
        number, self.backwards = self.backwards, self.backwards + 1
        grads = [gradient(self.case, number, f, event, self.live[f][1]) for f in event.of]
        self.sent |= {(self.event, f): _values(g) for f, g in zip(event.of, grads, strict=True)}
        self.backward = True
        try:
            with self._listening():
                self.subject.backward([y for _, y in pairs], grads, event.retain)
        finally:
            self.backward = False
        for f in event.of:
            x = self.live[f][0] if event.retain else self.live.pop(f)[0]
            if x.grad is not None:
                self.outputs[f"x{f}.grad@{self.event}"] = _values(x.grad)
                x.grad = None

    def _step(self) -> None:
        rate = LEARNING_RATE["sgd"]
        with torch.no_grad():
            for name, p in self.layers.named_parameters():
                if p.grad is not None:
                    self.outputs[f"{name}.grad@{self.event}"] = _values(p.grad)
                    p.add_(p.grad, alpha=-rate)
                    p.grad = None

    def _reload(self) -> None:
        file = io.BytesIO()
        torch.save(self.layers.state_dict(), file)
        file.seek(0)
        self.layers = self._build()
        self.subject.load(self.layers, torch.load(file, weights_only=False))

    @contextmanager
    def _listening(self) -> Iterator[None]:
        def hear(raw: RawCast | RawProduct) -> None:
            at = self.at[-1] if self.at else At("backward" if self.backward else "forward")
            if isinstance(raw, RawCast):
                self.casts.append(see_cast(raw, at))
            else:
                if at.phase == "backward" and raw.role == "output":
                    raw = replace(raw, role="gradient")  # where all products are called alike
                self.products.append(see_product(raw, at))

        with self.subject.listen(dict(self.layers.items()), hear):
            yield


def _model(
    run: _Run, event: Forward, number: int, *, again: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model as one function of its input, checkpointed as the schedule says."""
    schedule, subject = run.schedule, run.subject
    per_call = schedule.checkpoint in ("each", "nested")
    settings = run.settings  # of now: a recompute may come after a switch

    def inside(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def opened(x: torch.Tensor) -> Any:
            with subject.autocast(settings):
                return function(x)

        return opened if event.inside else function

    def recomputed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if not again:
            return function
        if schedule.checkpoint_by == "library":
            return lambda x: subject.checkpoint(function, x, schedule.reentrant)
        return lambda x: torch_checkpoint(function, x, use_reentrant=schedule.reentrant)

    def call(index: int, layer: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def one(x: torch.Tensor) -> torch.Tensor:
            at = At("recompute" if run.backward else "forward", number, index)
            run.calls.append(CallSeen(at, layer))
            run.at.append(at)
            try:
                if subject.caching:
                    out = run.layers[layer](x, is_first_microbatch=event.first)
                else:
                    out = run.layers[layer](x)
            finally:
                run.at.pop()
            assert isinstance(out, torch.Tensor)
            return out

        return recomputed(inside(one)) if per_call else one

    whole = _composed(schedule, event, call)
    if not per_call:
        whole = inside(whole)
    return recomputed(whole) if schedule.checkpoint in ("whole", "nested") else whole


def _composed(
    schedule: Schedule,
    event: Forward,
    call: Callable[[int, str], Callable[[torch.Tensor], torch.Tensor]],
) -> Callable[[torch.Tensor], torch.Tensor]:
    if schedule.layout == "branch":
        return call(0, str(event.path))
    if schedule.layout == "dangling":
        unused, used = call(0, "0"), call(1, "1")

        def both(x: torch.Tensor) -> torch.Tensor:
            unused(x)
            return used(x)

        return both
    names = ["0", "0"] if schedule.layout == "twice" else [str(i) for i in range(schedule.layers)]
    calls = [call(i, name) for i, name in enumerate(names)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for one in calls:
            x = one(x)
        return x

    return chain


def _values(x: torch.Tensor) -> F32:
    return np.array(x.detach().float().numpy(), dtype=np.float32)


def _error(raised: Exception, event: int) -> ScheduleError:
    frames = traceback.extract_tb(raised.__traceback__)
    last = (in_libraries(list(frames)) or frames)[-1]
    module = last.filename.rsplit("/", 1)[-1].removesuffix(".py")
    return ScheduleError(
        event=event,
        type=type(raised).__name__,
        message=str(raised),
        where=f"{module}.{last.name}",
        traceback="".join(traceback.format_exception(raised))[-4000:],
    )
