"""Trains a loss whose classes are sharded over ranks: PyTorch's ``loss_parallel``.

Scripts contain the source of these functions, with the values of a job substituted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from narrowfuzz.play.converted import called, fill
from narrowfuzz.play.job import Taps
from narrowfuzz.play.player import Trace, Training, by_steps, in_order, keep, microbatch, phased


def play_loss_parallel(
    make: Callable[[], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    job: Any,
    taps: Taps,
    on: Callable[..., list[Trace]],
) -> list[Trace]:
    """The traces of all ranks after training, each with the full tensors. ``on`` runs a function on
    every rank."""

    def main(rank: int, mesh: Any) -> Trace:
        trace, device = Trace(), torch.device(mesh.device_type)
        dtype = getattr(torch, job.dtype)

        def run_microbatches(numbers: range) -> None:
            for n in numbers:
                x, g = microbatch(tensors, n, job=job)
                _pass(trace, run, mesh, n, x.to(device, dtype), g.to(device, dtype))

        with phased(trace):
            with torch.no_grad():
                model = make()
                fill(model, tensors, job=job)
                for name, parameter in list(model.named_parameters()):
                    share = distribute_tensor(parameter, mesh, [Shard(0)])
                    setattr(model, name, nn.Parameter(share))
            run = Training(model, backward=torch.autograd.backward)
            run.call = called(run, job=job, taps=taps)
            by_steps(trace, run, run_microbatches, job=job, taps=taps)
            shares = {
                result: share
                for name, share in run.model.named_parameters()
                for result in (name, f"{name}.grad")
            }
            trace.kept = [
                one._replace(tensor=_whole(one.tensor, shares[one.name]))
                if one.name in shares
                else one
                for one in trace.kept
            ]
            trace.results = {name: t.cpu() for name, t in in_order(trace.kept).items()}
        return trace

    with loss_parallel():  # this switch is shared by all threads
        return on({"classes": job.layout.ranks}, main)


def _whole(part: torch.Tensor, share: Any) -> torch.Tensor:
    """The full tensor of a parameter, or of its gradient, from the ranks' parts."""
    like = share.detach()
    own = DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return own.full_tensor()


def _pass(trace: Trace, run: Training, mesh: Any, n: int, x: torch.Tensor, g: torch.Tensor) -> None:
    """One forward and backward on this rank's columns of the logits."""
    x, g = x.flatten(0, -2), g.flatten(0, -2)  # DTensor shards no dimension of a reshaped tensor
    logits = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    trace.phase, run.forward = "forward", n
    y = run.call(logits)
    trace.phase = "backward"
    run.backward([y], [distribute_tensor(g.to(y.dtype), mesh, [Replicate()])])
    assert logits.grad is not None
    keep(trace, run, "output", y.detach().full_tensor(), n)
    keep(trace, run, "grad_input", logits.grad.full_tensor(), n)
