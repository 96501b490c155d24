"""Trains one model on several ranks: FSDP2, tensor parallel, or both, as users lay it out.

Every rank plays the same events on its own piece of the data. As in the player, every function is
written to be specialised.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import set_checkpoint_early_stop

from narrowfuzz.play.converted import play
from narrowfuzz.play.layers import copies, whole_sum
from narrowfuzz.play.player import Event, Trace, phased

#: What emits the operands of the GEMMs that run on this thread.
_here = threading.local()


def play_sharded(
    build: Callable[[], nn.Module],
    convert: Callable[[nn.Module], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    events: Sequence[Event],
    *,
    data: int,
    tensor: int,
    styles: Mapping[str, str],
    narrow_styles: bool,
    sequence: bool,
    local_output: bool,
    units: tuple[str, ...],
    reduces: str,
    averages: bool,
    precomputes: bool,
    cuts: Mapping[str, int],
    rows: tuple[int, ...],
    width_in: int,
    width_out: int,
    ids: bool = False,
    tap: Callable[[Callable[..., None]], contextlib.AbstractContextManager[None]] | None = None,
    resume: Callable[..., None] | None = None,
    on: Callable[..., list[Trace]],
    **how: Any,
) -> list[Trace]:
    """What training leaves on every rank, those of a tensor-parallel group next to each other.

    ``data`` ranks share the rows [batch, rows] of the input, and shard the parameters by FSDP if
    there are any; 0 is no FSDP. ``tensor`` ranks share the linears named in ``styles``; 0 is no
    tensor parallelism, which cuts input and output gradient along the dimension in ``cuts``, if
    that is not 0. ``on`` runs a function on every rank. ``how`` is what ``play`` takes. After a
    "handover" it is ``resume`` that plays the rest. Raises what a rank raised first.
    """
    widths = {"input": 1 if ids else width_in, "grad_output": width_out}

    def part(
        trace: Trace, mesh: Any, events: Sequence[Event], *, data: int, tensor: int,
        cuts: Mapping[str, int], **how: Any,
    ) -> None:  # fmt: skip
        own, shapes = dict(tensors), {}
        for name, t in tensors.items():
            kind = name.partition("@")[0]
            if kind in cuts:
                group, inside = divmod(dist.get_rank(), max(tensor, 1))
                piece = t.reshape(*rows, widths[kind])
                if data:
                    piece = chunk(piece, data, group, 0)
                if cuts[kind]:
                    piece = chunk(piece, tensor, inside, cuts[kind])
                own[name], shapes[kind] = piece.flatten(0, -2), tuple(piece.shape)

        def shard(model: nn.Module) -> None:
            shard_model(
                model, mesh, data=data, tensor=tensor, styles=styles, narrow_styles=narrow_styles,
                sequence=sequence, dim=len(rows) - 1, local_output=local_output, units=units,
                reduces=reduces, averages=averages,
            )  # fmt: skip

        play(
            trace, build, convert, own, events, input_shape=shapes["input"],
            output_shape=shapes["grad_output"], ids=ids, shard=shard if data or tensor else None,
            precomputes=precomputes, **how,
        )  # fmt: skip

    def main(rank: int, mesh: Any) -> Trace:
        trace, see = Trace(), _of_this_thread if tap is not None else None
        begin: Any = functools.partial(part, data=data, tensor=tensor, cuts=cuts, tap=see, **how)
        with phased(trace):
            if resume is None:
                begin(trace, mesh, events)
            else:
                resume(begin, trace, mesh, events, folder)
        trace.results = {name: made(t) for name, t in trace.results.items()}
        return trace

    with contextlib.ExitStack() as stack:
        # what is switched for all threads is switched once
        stack.enter_context(set_checkpoint_early_stop(False))
        if tap is not None:
            stack.enter_context(tap(copies(_emit)))
        if resume is not None:
            folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        return on(mesh_of(data=data, tensor=tensor), main)


def made(t: Any) -> Any:
    """A result; of one that a collective is still making what it makes."""
    return t.trigger_wait() if hasattr(t, "trigger_wait") else t


def mesh_of(*, data: int, tensor: int) -> dict[str, int]:
    """The dimensions of a device mesh, by name."""
    return {name: size for name, size in (("data", data), ("tensor", tensor)) if size}


def chunk(t: torch.Tensor, pieces: int, which: int, dim: int) -> torch.Tensor:
    """One of so many pieces along a dimension, as DTensor cuts it: the last may be smaller, or
    empty."""
    cut = t.chunk(pieces, dim)
    return cut[which].clone() if which < len(cut) else t.narrow(dim, 0, 0).clone()


def shard_model(
    model: nn.Module,
    mesh: Any,
    *,
    data: int,
    tensor: int,
    styles: Mapping[str, str],
    narrow_styles: bool,
    sequence: bool,
    dim: int,
    local_output: bool,
    units: tuple[str, ...],
    reduces: str,
    averages: bool,
) -> None:
    """Tensor parallel first, then FSDP: each of ``units`` is gathered by itself, "" is the rest.
    ``dim`` is the dimension of the rows that a ``sequence`` is cut in. A package's own model knows
    how it is laid out."""
    own: Any = getattr(model, "shard", None)
    if own is not None:
        own(mesh, data=data, tensor=tensor, narrow_styles=narrow_styles, averages=averages)
    if tensor and own is None:
        colwise: Any = ColwiseParallel
        rowwise: Any = RowwiseParallel
        if narrow_styles:
            from torchao.float8 import float8_tensor_parallel as narrow

            colwise, rowwise = narrow.Float8ColwiseParallel, narrow.Float8RowwiseParallel
        rows = Shard(dim) if sequence else Replicate()
        plan = {
            name: colwise(input_layouts=rows, use_local_output=local_output)
            if style == "colwise"
            else rowwise(output_layouts=rows, use_local_output=local_output)
            for name, style in styles.items()
        }
        parallelize_module(model, mesh["tensor"], plan)
    if tensor:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(settled)
    if data and own is None:
        policy = MixedPrecisionPolicy()
        if reduces:
            policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduces))
        for unit in units:
            part: Any = fully_shard(model.get_submodule(unit), mesh=mesh["data"], mp_policy=policy)
            if not averages:  # a group that is not NCCL's knows no factor but a sum's
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)


def settled(parameter: Any) -> None:
    """A gradient that ranks hold parts of a sum of is added up."""
    if any(placement.is_partial() for placement in getattr(parameter.grad, "placements", ())):
        parameter.grad = whole_sum(parameter.grad)


@contextlib.contextmanager
def _of_this_thread(emit: Callable[..., None]) -> Iterator[None]:
    """``emit`` gets the GEMMs of the thread that runs."""
    _here.emit = emit
    try:
        yield
    finally:
        _here.emit = None


def _emit(*gemm: Any) -> None:
    emit = getattr(_here, "emit", None)
    if emit is not None:
        emit(*gemm)
