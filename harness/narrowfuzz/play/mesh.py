"""Trains one model on several ranks, laid out as users do it: FSDP2, tensor and expert parallelism,
DistributedDataParallel, and combinations.

Every rank plays the same events on its own piece of the data. Scripts contain the source of these
functions, with the values of a job substituted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import set_checkpoint_early_stop

from narrowfuzz.play.converted import play
from narrowfuzz.play.experts import in_groups, share_experts
from narrowfuzz.play.job import Event, Mesh, Taps
from narrowfuzz.play.layers import copies, whole_sum
from narrowfuzz.play.player import Trace, Training, keep_norm, phased

#: For each thread, the function that emits the operands of the GEMMs that run on it.
_here = threading.local()


@dataclass
class OnMesh:
    """A model laid out over the ranks of a device mesh, as one rank has it. Its events may begin
    with a state from elsewhere, or end by handing the state over."""

    laid: Mesh
    mesh: Any
    events: Sequence[Event]
    handover: Callable[[Training], None] | None = None
    ends: bool = True

    def feed(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], tuple[tuple[int, ...], ...]]:
        """This rank's part of the tensors, and the shapes of its input and output gradient."""
        laid, own, shapes = self.laid, dict(tensors), {}
        group, inside = divmod(dist.get_rank(), max(laid.tensor, 1))
        for name, cut in laid.cuts.items():
            piece = tensors[name].reshape(*laid.rows, laid.widths[name])
            if laid.data:
                piece = chunk(piece, laid.data, group, 0)
            if cut:
                piece = chunk(piece, laid.tensor, inside, cut)
            own[name], shapes[name] = piece.flatten(0, -2), tuple(piece.shape)
        return own, (shapes["input"], shapes["grad_output"])

    def place(self, run: Training) -> None:
        """Lay the model out."""
        if self.laid.shape:
            shard_model(run.model, self.mesh, self.laid)
        if self.laid.precomputes:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            run.stepped = precompute_float8_dynamic_scale_for_fsdp
            run.stepped(run.model)

    def wrap(self, run: Training, call: Any) -> Any:
        """The model in DistributedDataParallel; with another layout, ``call`` as it is."""
        options = self.laid.ddp
        return call if options is None else replica(run.model, call, self.mesh, options)

    def call(self, run: Training, call: Any) -> Any:
        """A call that adds gradients up over DDP's ranks only in the last microbatch of a step."""
        if self.laid.ddp is None:
            return call
        return synchronising(run, call, last_of_steps(self.events))

    def collect(self, trace: Trace, run: Training) -> None:
        """Record the norm of the gradients, which ranks compute together."""
        if self.laid.shape:
            keep_norm(trace, run)


def play_mesh(
    make: Callable[[], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    job: Any,
    taps: Taps,
    on: Callable[..., list[Trace]],
) -> list[Trace]:
    """The traces of all ranks after training, those of a tensor-parallel group next to each other.
    ``on`` runs a function on every rank. Raises the first exception of any rank."""

    def part(trace: Trace, mesh: Any) -> None:
        layout = OnMesh(job.layout, mesh, job.events)
        play(trace, make, tensors, job=job, taps=taps, layout=layout)

    with contextlib.ExitStack() as stack:
        if job.low_bit:  # one stance for all threads
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return on_mesh(part, job.layout.shape, on, taps=taps)


def on_mesh(
    part: Callable[[Trace, Any], None],
    shape: Mapping[str, int],
    on: Callable[..., list[Trace]],
    *,
    taps: Taps,
) -> list[Trace]:
    """The traces of ``part``, which each rank of a mesh runs."""

    def main(rank: int, mesh: Any) -> Trace:
        trace = Trace()
        with phased(trace):
            part(trace, mesh)
        trace.results = {name: made(t) for name, t in trace.results.items()}
        return trace

    with contextlib.ExitStack() as stack:
        # switches that all threads share are set once
        stack.enter_context(set_checkpoint_early_stop(False))
        if taps.shared is not None:
            stack.enter_context(taps.shared(copies(_emit)))
        return on(shape, main)


def made(t: Any) -> Any:
    """The result itself; if a collective is still computing it, wait for it."""
    return t.trigger_wait() if hasattr(t, "trigger_wait") else t


def chunk(t: torch.Tensor, pieces: int, which: int, dim: int) -> torch.Tensor:
    """One of ``pieces`` pieces along a dimension, as DTensor cuts it: the last may be smaller, or
    empty."""
    cut = t.chunk(pieces, dim)
    return cut[which].clone() if which < len(cut) else t.narrow(dim, 0, 0).clone()


def shard_model(model: nn.Module, mesh: Any, laid: Mesh) -> None:
    """Lay out experts and tensor parallelism first, then FSDP. A package's own model may lay itself
    out by its method ``shard``."""
    data, tensor = laid.data, laid.tensor
    if laid.experts:
        parts = in_groups(mesh, laid.experts)
        share_experts(model, parts["experts", "tensor"] if tensor else parts["experts"])
    own: Any = getattr(model, "shard", None)
    if own is not None:
        own(
            mesh,
            data=data,
            tensor=tensor,
            narrow_styles=laid.narrow_styles,
            averages=laid.averages,
        )
    if laid.styles and tensor and own is None:
        colwise: Any = ColwiseParallel
        rowwise: Any = RowwiseParallel
        if laid.narrow_styles:
            from torchao.float8 import float8_tensor_parallel as narrow

            colwise, rowwise = narrow.Float8ColwiseParallel, narrow.Float8RowwiseParallel
        dim, local = len(laid.rows) - 1, laid.local_output
        rows = Shard(dim) if laid.sequence else Replicate()
        styles = {
            "colwise": lambda: colwise(input_layouts=rows, use_local_output=local),
            "rowwise": lambda: rowwise(output_layouts=rows, use_local_output=local),
            "sequence": lambda: SequenceParallel(sequence_dim=dim, use_local_output=local),
        }
        plan = {name: styles[style]() for name, style in laid.styles.items()}
        parallelize_module(model, mesh["tensor"], plan)
    if tensor:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(settled)
    if data and own is None and laid.ddp is None:
        policy = MixedPrecisionPolicy()
        if laid.reduces:
            policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, laid.reduces))
        replicas = ("replicas",) if laid.replicas else ()
        over: dict[str, Any] = {"experts": parts[*replicas, "groups"]} if laid.experts else {}
        over |= dict.fromkeys(laid.units, mesh[*replicas, "data"])
        for unit, ranks in over.items():
            part: Any = fully_shard(model.get_submodule(unit), mesh=ranks, mp_policy=policy)
            if laid.forces_sums:
                part.set_force_sum_reduction_for_comms(True)
            if not laid.averages or ranks.size() != data:
                part.set_gradient_divide_factor(float(data) if laid.averages else 1.0)


class Called(nn.Module):
    """A model that is called in another way (recomputed, for one), as one module."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.how = model, call

    def forward(self, *args: Any) -> Any:
        return self.how(*args)


def replica(model: nn.Module, call: Any, mesh: Any, options: Mapping[str, Any]) -> nn.Module:
    """The model in DistributedDataParallel: each rank has all of it."""
    whole = call if call is model else Called(model, call)
    group = mesh["replicas"].get_group()
    return DistributedDataParallel(whole, process_group=group, **options)


def synchronising(run: Training, call: Any, last: Sequence[int]) -> Callable[..., Any]:
    """Calls of a DistributedDataParallel model that sum gradients in the forwards ``last`` only."""

    def called(*args: Any) -> Any:
        ddp = getattr(call, "_orig_mod", call)
        with contextlib.nullcontext() if run.forward in last else ddp.no_sync():
            return call(*args)

    return called


def last_of_steps(events: Sequence[Event]) -> list[int]:
    """The numbers of the last forward before each step, and before the end."""
    last = -1
    found: list[int] = []
    for event, *how in (*events, ("step",)):
        if event == "forward":
            last = how[0]
        if event == "step" and last not in (-1, *found):
            found.append(last)
    return found


def settled(parameter: Any) -> None:
    """Add up a gradient of which ranks hold partial sums."""
    if any(placement.is_partial() for placement in getattr(parameter.grad, "placements", ())):
        parameter.grad = whole_sum(parameter.grad)


@contextlib.contextmanager
def of_this_thread(emit: Callable[..., None]) -> Iterator[None]:
    """``emit`` gets the GEMMs of the current thread."""
    _here.emit = emit
    try:
        yield
    finally:
        _here.emit = None


def _emit(*gemm: Any) -> None:
    emit = getattr(_here, "emit", None)
    if emit is not None:
        emit(*gemm)
