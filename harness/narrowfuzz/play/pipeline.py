"""Trains a chain of models as a pipeline: each rank has one stage of it, or two.

Scripts contain the source of these functions, with the values of a job substituted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from narrowfuzz.play.converted import called, fill
from narrowfuzz.play.job import Taps
from narrowfuzz.play.player import Trace, Training, by_steps, keep, microbatch, phased


def chained(build: Callable[[], nn.Module], stages: int) -> nn.Module:
    """``stages`` models, each of which takes what the one before returns."""
    return nn.Sequential(*(build() for _ in range(stages)))


class Stage(nn.Module):
    """A part of the chain. Its input is copied to memory of its own: the order in which a product
    is summed may depend on where rows begin."""

    def __init__(self, part: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.part, self.call = part, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x.clone())


def play_pipeline(
    make: Callable[[], nn.Module],
    tensors: Mapping[str, torch.Tensor],
    *,
    job: Any,
    taps: Taps,
    on: Callable[..., list[Trace]],
) -> list[Trace]:
    """The traces of all ranks after training: outputs on the last, and the gradients of its own
    stages on each. ``make`` makes the whole chain. Microbatches are the rows of ``play``'s
    forwards, and their gradients add up. ``on`` runs a function on every rank."""
    from torch.distributed import pipelining

    per_rank = 2 if job.layout.schedule == "interleaved" else 1
    ranks, dtype = job.layout.stages // per_rank, getattr(torch, job.dtype)

    def main(rank: int, mesh: Any) -> Trace:
        trace, own = Trace(), [str(number) for number in range(rank, job.layout.stages, ranks)]
        device = torch.device(mesh.device_type)

        def run_microbatches(numbers: range) -> None:
            pairs = [microbatch(tensors, n, job=job) for n in numbers]
            x, g = zip(*pairs, strict=True)
            fed = (torch.cat(x).to(device, dtype),) if rank == 0 else ()
            last = {"target": torch.cat(g).to(device, dtype)} if rank == ranks - 1 else {}
            y = pipeline.step(*fed, **last)
            for n, part in zip(numbers, y.chunk(len(numbers)) if last else (), strict=False):
                keep(trace, run, "output", part.detach().flatten(0, -2), n)

        with phased(trace):
            with torch.no_grad():
                chain = make()
                fill(chain, tensors, job=job)
            parts = {number: chain.get_submodule(number) for number in own}
            run = Training(nn.ModuleDict(parts), backward=torch.autograd.backward)
            made: list[Any] = [
                pipelining.PipelineStage(
                    Stage(part, called(Training(part), job=job, taps=taps)),
                    int(number),
                    job.layout.stages,
                    device,
                    group=mesh.get_group(),
                )
                for number, part in parts.items()
            ]
            kind: Any = {
                "gpipe": pipelining.ScheduleGPipe,
                "1f1b": pipelining.Schedule1F1B,
                "interleaved": pipelining.ScheduleInterleaved1F1B,
            }[job.layout.schedule]
            mine = made if per_rank > 1 else made[0]
            many = job.layout.microbatches
            pipeline = kind(mine, many, loss_fn=_loss_with_gradient, scale_grads=False)
            by_steps(trace, run, run_microbatches, job=job, taps=taps)
        return trace

    return on({"stage": ranks}, main)


def _loss_with_gradient(output: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is ``grad_output``."""
    return (output.float() * grad_output.float()).sum()
