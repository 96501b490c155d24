"""Trains a model with the rows of each sequence sharded over ranks: PyTorch's context parallelism.

Scripts contain the source of these functions, with the values of a job substituted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowfuzz.play.converted import called, fill
from narrowfuzz.play.job import Taps
from narrowfuzz.play.player import Trace, Training, by_steps, keep, microbatch, phased

#: Attention kernels for which keys and values can be passed from rank to rank.
_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
#: The dimension of the rows, which ranks shard.
_ROWS = 1


def play_context_parallel(
    make: Callable[[], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    job: Any,
    taps: Taps,
    on: Callable[..., list[Trace]],
) -> list[Trace]:
    """The traces of all ranks after training: outputs and input gradients are gathered from all
    ranks, and parameter gradients are summed. ``on`` runs a function on every rank."""

    def main(rank: int, mesh: Any) -> Trace:
        trace, device = Trace(), torch.device(mesh.device_type)
        dtype = getattr(torch, job.dtype)

        def run_microbatches(numbers: range) -> None:
            for n in numbers:
                x, g = microbatch(tensors, n, job=job)
                _pass(trace, run, mesh, n, x.to(device, dtype), g.to(device, dtype))
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=mesh.get_group())

        with phased(trace):
            with torch.no_grad():
                model = make()
                fill(model, tensors, job=job)
            run = Training(model, backward=torch.autograd.backward)
            run.call = called(run, job=job, taps=taps)
            set_rotate_method(job.layout.rotates)
            by_steps(trace, run, run_microbatches, job=job, taps=taps)
        return trace

    return on({"context": job.layout.ranks}, main)


def unavailable() -> str:
    """Why context parallelism has no attention on a CPU here, or "" if it has."""
    parts = getattr(experimental, "_context_parallel", None) or experimental
    handled = getattr(parts._attention, "custom_ops", {})
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    reason = f"context parallelism in PyTorch {torch.__version__} does not support CPU attention"
    return "" if attention in handled else reason


def _pass(trace: Trace, run: Training, mesh: Any, n: int, x: torch.Tensor, g: torch.Tensor) -> None:
    """One forward and backward on this rank's rows, which ``context_parallel`` picks in place."""
    with contextlib.ExitStack() as stack:
        if x.is_cuda:
            stack.enter_context(sdpa_kernel(_KERNELS))
        stack.enter_context(
            context_parallel(
                mesh, buffers=[x, g], buffer_seq_dims=[_ROWS, _ROWS], no_restore_buffers={x, g}
            )
        )
        with torch.enable_grad():  # context_parallel turns gradients off
            x.requires_grad_()
            trace.phase, run.forward = "forward", n
            y = run.call(x)
            trace.phase = "backward"
            run.backward([y], [g.to(y.dtype)])
        assert x.grad is not None
        whole = context_parallel_unshard(mesh, [y.detach(), x.grad], [_ROWS, _ROWS])
    keep(trace, run, "output", whole[0].flatten(0, -2), n)
    keep(trace, run, "grad_input", whole[1].flatten(0, -2), n)
