"""Makes a model, converts and fills it, and trains it: the case of a recipe.

Scripts contain the source of these functions, with the values of a job substituted.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from narrowfuzz.play.checkpoint import full, numbered, recomputing, reentrant, selective
from narrowfuzz.play.job import Job, Taps
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.play.layers import LayerWatch, copies, on_this_rank
from narrowfuzz.play.player import Trace, Training, in_order, keep_state, leave, train


def play(
    trace: Trace,
    make: Callable[[], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    job: Job,
    taps: Taps,
    layout: Any = None,
) -> Trace:
    """Make, convert, fill and train a model; returns the trace. A ``layout`` over ranks places the
    model, feeds this rank its part of the tensors and adds results common to ranks; calls are then
    watched outside its hooks. Unless ``layout.ends``, the training goes on elsewhere."""
    with torch.no_grad():
        model = make()
        if job.lifecycle != "none":
            model = renewed(model, make, lifecycle=job.lifecycle)
        fill(model, tensors, job=job)
    shapes = job.input_shape, job.output_shape
    run = Training(model, shapes, backward=torch.autograd.backward)
    events, own = job.events, tensors
    if layout is not None:
        events, run.handover = layout.events, layout.handover
        own, run.shapes = layout.feed(tensors)
        layout.place(run)
    if "open" in job.happens or job.autocast:
        run.region = regions_of(job.device, job.autocast)

    def prepare() -> None:
        run.call = called(run, job=job, taps=taps, layout=layout)
        if taps.watch:
            watching.follow(linears(run.model, taps=taps))

    if "reload" in job.happens:
        run.anew, run.prepare = make, prepare
    if "reload" in job.happens or "rollback" in job.happens:
        run.load = nn.Module.load_state_dict
    with contextlib.ExitStack() as stack:
        if taps.watch:
            watching = LayerWatch(run)
            if layout is not None:
                watching.outside, watching.own = True, on_this_rank
            trace.calls = watching.calls
            if layout is None:  # with one it is set once for all ranks
                stack.enter_context(set_checkpoint_early_stop(False))
            stack.enter_context(watching.recording())
            if taps.tap is not None:
                stack.enter_context(taps.tap(copies(watching.emit)))
        if taps.tap is not None and not taps.watch:
            stack.enter_context(taps.tap(copies(lambda *gemm: trace.gemms.append(gemm))))
        prepare()
        torch.manual_seed(0)
        if taps.around is not None:
            stack.enter_context(taps.around())
        if job.kernels == "native":
            stack.enter_context(without_onednn())
        train(trace, run, own, events, job=job, taps=taps)
    if taps.keeps and (layout is None or layout.ends):
        keep_state(trace, run, job=job)
        if layout is not None:
            layout.collect(trace, run)
        trace.results = {name: t.cpu() for name, t in in_order(trace.kept).items()}
    if "reload" in job.happens:
        leave(run)
    return trace


def regions_of(device: str, autocast: bool) -> Callable[[bool | None], Any]:
    """A function that opens a region: torch's autocast, disabled for None or False; or nothing."""
    if autocast:
        return lambda narrow: torch.autocast(device, torch.bfloat16, enabled=bool(narrow))
    return lambda narrow: contextlib.nullcontext()


def renewed(model: nn.Module, anew: Callable[[], nn.Module], *, lifecycle: str) -> nn.Module:
    """The model itself, a deep copy of it, or a new model that has loaded its state."""
    if lifecycle == "deepcopy":
        return copy.deepcopy(model)
    if lifecycle == "reload":
        other = anew()
        other.load_state_dict(model.state_dict())
        return other
    return model


def fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, job: Job) -> None:
    """Write a case's values into the parameters and clear their gradients."""
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[job.tied.get(name, name)].to(getattr(torch, job.dtype)))
        parameter.grad = None


def called(run: Training, *, job: Job, taps: Taps, layout: Any = None) -> Any:
    """A callable that runs the model as the job demands: recomputed, wrapped by its layout,
    compiled, or as it is. If calls are watched, a recompute knows which forward it repeats."""
    call: Any = run.model
    if job.recompute.how:
        how: Any
        if job.recompute.how == "selective":
            # a package's own model may bring its own policy
            how = getattr(run.model, "selective", selective)
        elif job.recompute.how == "reentrant":
            how = reentrant
        else:
            how = full
        if taps.watch:
            how = numbered(how, run)
        call = recomputing(run.model, how, job.recompute.regions, job.recompute.whole)
    if layout is not None:
        call = layout.wrap(run, call)
    if job.compile.memory_budget < 1:
        from torch._functorch import config

        config.activation_memory_budget = job.compile.memory_budget
    if job.compile.backend:
        call = torch.compile(call, backend=job.compile.backend, **job.compile.options)
    return call if layout is None else layout.call(run, call)


def linears(model: nn.Module, *, taps: Taps) -> dict[str, nn.Module]:
    """The watched modules of a model by name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: modules[name] for name in taps.watch if name in modules}
