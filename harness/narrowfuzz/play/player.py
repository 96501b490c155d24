"""Plays one training, event by event, and records its results: of a model that a recipe converted
(``converted.py``) or of a library's own layers (``library.py``).

Arms, the float64 reference and scripts consist of these functions. They are written to be
specialised: a script contains them with every constant keyword argument substituted, and without
the branches that are never taken.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from narrowfuzz.play.job import CLIPS_AT, FIRST_SCALE, Event, Job, Taps

#: One result: output, grad_input, <parameter>.grad or <parameter>, with its forward and event.
Kept = namedtuple("Kept", "name forward event tensor")


@dataclass
class Trace:
    """The results of a training, in order, and by name once it is over; and how far it came
    (``phase``). The calls of watched linears, or the GEMMs where none is watched. For a library's
    layers also what was ``recorded``, their ``states``, what was ``pending`` and the parameters it
    ``began`` with."""

    kept: list[Kept] = field(default_factory=list)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    gemms: list[Any] = field(default_factory=list)
    recorded: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)
    began: dict[str, Any] = field(default_factory=dict)
    phase: str = "convert"
    #: The step inside a phase, if it is not the one that the phase is named after; for messages.
    doing: str = ""
    #: The training of a library's layers that runs, or that raised.
    training: Any = None


def call_of(trace: Trace, module: str, index: int, phase: str = "forward") -> Any:
    """One call of a watched linear. Raises LookupError if there was none."""
    for call in trace.calls:
        if (call.module, call.index, call.phase) == (module, index, phase):
            return call
    raise LookupError(f"{module} was not called {index + 1} times in {phase}")


@dataclass
class Training:
    """A model in training: the shapes of its input and output; functions that call it, make another
    one (``anew``) and ``prepare`` it, open a region, run a backward, load a state, hand it over and
    follow a step; its optimizer if any, the state it ``began`` with, the current event, forward and
    checkpointed call (``segment``), and input and output of each forward whose graph exists. For a
    library's layers ``record`` gets what happens, and ``at`` is where that is."""

    model: Any
    shapes: tuple[tuple[int, ...], ...] = ((), ())
    call: Any = None
    anew: Any = None
    prepare: Any = None
    region: Any = None
    backward: Any = None
    load: Any = None
    optimizer: Any = None
    began: Any = None
    event: int = -1
    forward: int = 0
    segment: int = 0
    segments: int = 0
    scaler: Any = None
    live: dict[int, Any] = field(default_factory=dict)
    regions: list[Any] = field(default_factory=list)
    stepped: Any = None
    handover: Any = None
    record: Any = None
    at: list[Any] = field(default_factory=list)


def train(
    trace: Trace,
    run: Training,
    tensors: Mapping[str, torch.Tensor],
    events: Iterable[Event],
    *,
    job: Job,
    taps: Taps,
) -> None:
    """Play all events in order; results, if ``taps`` keep any, are recorded without copies."""
    if job.optimizer:
        run.optimizer = optimizing(run.model, job=job)
    if job.loss_scaling != "none":
        run.scaler = scaling(job=job)
    if "rollback" in job.happens:
        run.began = saved(run.model)
    for run.event, (event, *how) in enumerate(events):
        if "open" in job.happens and event == "open":
            run.regions.append(contextlib.ExitStack())
            run.regions[-1].enter_context(run.region(how[0]))
        if "close" in job.happens and event == "close":
            run.regions.pop().close()
        if "forward" in job.happens and event == "forward":
            forward(trace, run, tensors, *how, job=job, taps=taps)
        if "backward" in job.happens and event == "backward":
            backward(trace, run, tensors, *how, job=job, taps=taps)
        if "step" in job.happens and event == "step":
            step(trace, run, *how, job=job, taps=taps)
        if "reload" in job.happens and event == "reload":
            trace.phase, state = "convert", saved(run.model)
            run.model = run.anew(*how[1:])
            trace.doing = "load"
            run.load(run.model, loaded(state, weights_only=how[0]))
            trace.doing = ""
            run.prepare()
            if job.optimizer:
                # state_dict() holds the very tensors that a step changes
                moments = copy.deepcopy(run.optimizer.state_dict())
                run.optimizer = optimizing(run.model, job=job)
                run.optimizer.load_state_dict(moments)
        if "handover" in job.happens and event == "handover":
            trace.phase = "convert"
            run.handover(run)
        if "rollback" in job.happens and event == "rollback":
            trace.phase = "convert"
            run.load(run.model, loaded(run.began, weights_only=False))
            if job.optimizer:
                run.optimizer = optimizing(run.model, job=job)


def leave(run: Training) -> None:
    """Release the model, which reference cycles would keep alive after the training, and close open
    regions: a training may end in one, or raise there."""
    run.live.clear()
    run.model = run.call = run.backward = run.anew = run.prepare = None
    while run.regions:
        run.regions.pop().close()


def saved(model: nn.Module) -> io.BytesIO:
    """A file with the model's state."""
    torch.save(model.state_dict(), file := io.BytesIO())
    return file


def loaded(file: io.BytesIO, *, weights_only: bool) -> Any:
    """The state in such a file."""
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def optimizing(model: nn.Module, *, job: Job) -> Any:
    """An optimizer of the parameters that train."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if job.low_bit:
        import torchao.optim

        return getattr(torchao.optim, job.optimizer)(trained, **job.options)
    return getattr(torch.optim, job.optimizer)(trained, **job.options)


def scaling(*, job: Job) -> Any:
    """A loss scaler that doubles the scale after each step that it takes, and halves it after each
    that it skips. The gradients that are given are those of the scaled loss."""
    if job.loss_scaling == "by_hand":
        return ByHand(FIRST_SCALE)
    kind: Any = torch.amp.GradScaler
    device = torch.device(job.device)
    if job.loss_scaling == "sharded":  # checks all ranks for infinities
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        # its default is the group that existed when its module was imported
        kind = partial(ShardedGradScaler, process_group=torch.distributed.group.WORLD)
    scaler = kind(device.type, init_scale=FIRST_SCALE, growth_interval=1)
    scaler.scale(torch.zeros((), device=device))
    return scaler


@dataclass
class ByHand:
    """The definition of GradScaler, for gradients of one process."""

    scale: float
    #: Whether all gradients were finite when they were unscaled for the next step; None before.
    finite: bool | None = None

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale."""
        every = (p.grad for group in optimizer.param_groups for p in group["params"])
        grads = [grad for grad in every if grad is not None]
        self.finite = all(bool(grad.isfinite().all()) for grad in grads)
        for grad in grads:
            grad.mul_(1 / self.scale)

    def step(self, optimizer: Any) -> None:
        """Divide the gradients unless that is done, and step if all of them are finite."""
        if self.finite is None:
            self.unscale_(optimizer)
        if self.finite:
            optimizer.step()

    def update(self) -> None:
        """Change the scale, depending on whether the step was taken."""
        self.scale *= 2.0 if self.finite else 0.5
        self.finite = None

    def get_scale(self) -> float:
        """The scale."""
        return self.scale


def keep(trace: Trace, run: Training, name: str, result: torch.Tensor, forward: int = -1) -> None:
    """Record a result of the current event; a library's own tensor is unwrapped first."""
    trace.kept.append(Kept(name, forward, run.event, innermost(result)))


def keep_gradients(trace: Trace, run: Training, called: str = "grad") -> None:
    """Record copies of all gradients that exist."""
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            keep(trace, run, f"{name}.{called}", parameter.grad.clone())


def keep_state(trace: Trace, run: Training, *, job: Job) -> None:
    """Record the gradients that exist at the end, the parameters if steps have moved them, and
    buffers that forwards change."""
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            keep(trace, run, f"{name}.grad", parameter.grad)
        if job.moves:
            keep(trace, run, name, parameter.detach())
    if job.buffers:
        for name in job.buffers:
            buffer = run.model.get_buffer(name).to(torch.float32, copy=True)
            keep(trace, run, f"{name}.buffer", buffer)


def innermost(t: Any) -> Any:
    """The tensor inside a library's own tensor: this rank's part if it is laid out over ranks, and
    what a wrapper wraps."""
    for name in ("_local_tensor", "_tensor", "_data"):
        t = getattr(t, name, t)
    return t


def laid_out(t: torch.Tensor, like: Any) -> Any:
    """This rank's part as a whole DTensor if ``like`` is laid out over ranks, else as it is."""
    if hasattr(like, "placements"):
        t = type(like).from_local(t, like.device_mesh, like.placements)
    return t


def by_mesh(model: nn.Module) -> list[list[Any]]:
    """The parameters that have gradients, grouped by device mesh: one operator takes only gradients
    of one mesh."""
    found: dict[Any, list[Any]] = {}
    for p in model.parameters():
        if p.grad is not None:
            found.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    return list(found.values())


def norm_of(meshes: list[list[Any]], order: float = 2.0) -> torch.Tensor:
    """The norm of all gradients, as clipping computes it: with several meshes, the norm of the
    norms of each."""
    every = [torch.nn.utils.get_total_norm([p.grad for p in some], order) for some in meshes]
    norms = [replicated(norm) for norm in every]
    return torch.linalg.vector_norm(torch.stack(norms), order) if len(norms) > 1 else norms[0]


def replicated(norm: Any) -> Any:
    """A number that is laid out over ranks, in full on each of them."""
    return norm.full_tensor() if hasattr(norm, "placements") else norm


def keep_norm(trace: Trace, run: Training) -> None:
    """Record the norm of all gradients that exist."""
    if meshes := by_mesh(run.model):
        keep(trace, run, "norm", norm_of(meshes))


def clip(trace: Trace, run: Training, *, job: Job, taps: Taps) -> None:
    """Clip the gradients, by their common norm or each value by itself."""
    meshes = by_mesh(run.model)
    for some in meshes if job.clipping == "value" else ():
        torch.nn.utils.clip_grad_value_(some, CLIPS_AT)
    if job.clipping != "value" and meshes:
        order = torch.inf if job.clipping == "norm_inf" else 2.0
        if len(meshes) == 1:
            norm = replicated(torch.nn.utils.clip_grad_norm_(meshes[0], CLIPS_AT, order))
        else:
            norm = norm_of(meshes, order)
            for some in meshes:
                torch.nn.utils.clip_grads_with_norm_(some, CLIPS_AT, norm)
        if taps.keeps:
            keep(trace, run, "norm", norm)
    if taps.keeps:
        keep_gradients(trace, run, "clipped")


def in_order(results: Iterable[Kept]) -> dict[str, torch.Tensor]:
    """Results by name: the last of a name has the plain name, those before it a number, as in
    output@0."""
    found: dict[str, list[torch.Tensor]] = {}
    for result in results:
        found.setdefault(result.name, []).append(result.tensor)
    return {
        name if i == len(many) - 1 else f"{name}@{i}": t
        for name, many in found.items()
        for i, t in enumerate(many)
    }


def given(tensors: Mapping[str, torch.Tensor], name: str, *places: Any) -> torch.Tensor:
    """The tensor of the first of these places that has one of its own, else the common one."""
    own = (f"{name}@{place}" for place in places)
    return tensors[next((key for key in own if key in tensors), name)]


def seed(number: int) -> None:
    """Like torch.manual_seed, for the generators of the CPU and, once it is initialised, of CUDA.
    torch.manual_seed also formats a stack trace for each kind of device that is not initialised,
    which takes longer than a small call."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


@contextlib.contextmanager
def phased(trace: Trace) -> Iterator[None]:
    """Exceptions raised inside get an attribute ``phase``: how far the training had come."""
    try:
        yield
    except Exception as error:
        error.phase = trace.phase  # type: ignore[attr-defined]
        raise


def microbatch(
    tensors: Mapping[str, torch.Tensor], number: int, *, job: Job
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output gradient of this forward, where each forward has a backward of its own."""
    x = given(tensors, "input", number).roll(number, 0).reshape(job.input_shape)
    g = given(tensors, "grad_output", f"{number}/{number}", number)
    return x, g.reshape(job.output_shape)


def by_steps(
    trace: Trace, run: Training, run_microbatches: Callable[[range], None], *, job: Any, taps: Taps
) -> None:
    """Train in plain steps on ranks: ``run_microbatches`` runs forward and backward of the
    microbatches of a range."""
    if job.optimizer:
        run.optimizer = optimizing(run.model, job=job)
    if job.loss_scaling != "none":
        run.scaler = scaling(job=job)
    trace.phase, many = "forward", job.layout.microbatches
    for number in range(job.layout.steps):
        run_microbatches(range(number * many, (number + 1) * many))
        if job.optimizer:
            step(trace, run, True, job=job, taps=taps)
    keep_state(trace, run, job=job)
    trace.results = {name: t.cpu() for name, t in in_order(trace.kept).items()}


def forward(
    trace: Trace,
    run: Training,
    tensors: Mapping[str, torch.Tensor],
    number: int,
    row_shift: int,
    mode: str,
    narrow: bool,
    *,
    job: Job,
    taps: Taps,
) -> None:
    """Run the model; in mode train, with a graph."""
    x = given(tensors, "input", number).roll(row_shift, 0)
    if job.ids:
        x = x.to(job.device).long().reshape(run.shapes[0][:-1])
    else:
        x = x.to(job.device, getattr(torch, job.dtype)).reshape(run.shapes[0])
        if job.input_layout != "contiguous":
            x = arranged(x, job.input_layout)
        x = x.detach().requires_grad_(job.input_grad)
    trace.phase, run.forward = "forward", number
    if "eval" in job.modes and mode == "eval":
        evaluating = [part for part in run.model.modules() if not part.training]
        run.model.eval()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(mode == "train"))
        if "inference" in job.modes and mode == "inference":
            stack.enter_context(torch.inference_mode())
            if taps.inference is not None:
                stack.enter_context(taps.inference())
        if job.autocast and narrow:
            stack.enter_context(run.region(True))
        if job.autocast and not job.ids:  # noqa: SIM108 - a leaf's cast would be cached by autocast
            y = run.call(x.view_as(x))
        else:
            y = run.call(x)
    if "eval" in job.modes and mode == "eval":
        run.model.train()
        for part in evaluating:  # as before
            if part.training:
                part.train(False)
    if taps.keeps:
        keep(trace, run, "output", innermost(y.detach()).flatten(0, -2), number)
    if mode == "train":
        run.live[number] = x, y


def backward(
    trace: Trace,
    run: Training,
    tensors: Mapping[str, torch.Tensor],
    number: int,
    of: tuple[int, ...],
    retain: bool,
    *,
    job: Job,
    taps: Taps,
) -> None:
    """One backward through the outputs of these forwards."""
    trace.phase = "backward"
    ends, grads = [run.live[f][1] for f in of], []
    for f, y in zip(of, ends, strict=True):
        g = given(tensors, "grad_output", f"{number}/{f}", number)
        g = g.to(job.device, getattr(torch, job.dtype)).reshape(run.shapes[1])
        if job.grad_layout != "contiguous":
            g = arranged(g, job.grad_layout)
        grads.append(laid_out(g.to(y.dtype), y))
    run.backward(ends, grads, retain)
    for f in of:
        x = run.live[f][0] if retain else run.live.pop(f)[0]
        if taps.keeps and x.grad is not None:
            keep(trace, run, "grad_input", x.grad.flatten(0, -2), f)
        x.grad = None
    if taps.adds:
        keep_gradients(trace, run, "added")


def step(trace: Trace, run: Training, to_none: bool, *, job: Job, taps: Taps) -> None:
    """The optimizer's step; then gradients are None, or zeros."""
    if taps.keeps and to_none:
        keep_gradients(trace, run)  # copied: later code may change them in place
    if job.clipping != "none":
        if job.loss_scaling != "none":
            run.scaler.unscale_(run.optimizer)
        clip(trace, run, job=job, taps=taps)
    # its step is compiled, for ten seconds the first time; ranks set the stance once for all
    if job.low_bit and job.layout is None:
        with torch.compiler.set_stance("force_eager"):
            take(run, job=job)
    else:
        take(run, job=job)
    if taps.steps:
        for name, parameter in run.model.named_parameters():
            keep(trace, run, name, innermost(parameter).detach().clone())
    if job.loss_scaling != "none" and taps.keeps:
        keep(trace, run, "loss_scale", torch.tensor(run.scaler.get_scale()))
    run.optimizer.zero_grad(set_to_none=to_none)
    if run.stepped is not None:
        run.stepped(run.model)


def take(run: Training, *, job: Job) -> None:
    """One step of the optimizer, directly or through the loss scaler."""
    if job.loss_scaling == "none":
        run.optimizer.step()
    else:
        run.scaler.step(run.optimizer)
        run.scaler.update()


def in_memory(model: nn.Module, layout: str) -> nn.Module:
    """The model, with its parameters in this memory layout."""
    for parameter in model.parameters():
        parameter.data = arranged(parameter.data, layout)
    return model


def arranged(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in a memory layout; a vector is not transposed."""
    if layout == "transposed" and t.ndim > 1:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        return torch.stack((t, torch.zeros_like(t)), -1).flatten(-2)[..., ::2]
    if layout == "expanded" and t.numel():
        return t.reshape(-1, t.shape[-1])[0].expand(t.shape)
    return t
