"""Trains a chain of models as a pipeline: each rank has one stage of it, or two.

As in the player, every function is written to be specialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from narrowfuzz.play.converted import called, fill
from narrowfuzz.play.job import Taps
from narrowfuzz.play.player import (
    Trace,
    Training,
    in_order,
    keep,
    keep_state,
    microbatch,
    optimizing,
    phased,
    step,
)


def chained(build: Callable[[], nn.Module], stages: int) -> nn.Module:
    """So many models, each on what the one before returns."""
    return nn.Sequential(*(build() for _ in range(stages)))


class Stage(nn.Module):
    """A part of the chain as it is called, on an input in memory of its own: how a product is added
    may go by where rows begin."""

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
    """What training leaves on every rank: outputs on the last, and the gradients of its own stages
    on each. ``make`` makes the whole chain. Microbatches are the rows of ``play``'s forwards, and
    their gradients add up. ``on`` runs a function on every rank."""
    from torch.distributed import pipelining

    per_rank = 2 if job.layout.schedule == "interleaved" else 1
    ranks = job.layout.stages // per_rank

    def main(rank: int, mesh: Any) -> Trace:
        trace, own = Trace(), [str(number) for number in range(rank, job.layout.stages, ranks)]
        device = torch.device(mesh.device_type)
        with phased(trace):
            with torch.no_grad():
                chain = make()
                fill(chain, tensors, job=job)
            parts = {number: chain.get_submodule(number) for number in own}
            run = Training(nn.ModuleDict(parts), backward=torch.autograd.backward)
            if job.optimizer:
                run.optimizer = optimizing(run.model, job=job)
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
            microbatches, dtype = job.layout.microbatches, getattr(torch, job.dtype)
            mine = made if per_rank > 1 else made[0]
            pipeline = kind(mine, microbatches, loss_fn=_sent_back, scale_grads=False)
            trace.phase = "forward"
            for turn in range(job.layout.steps):
                numbers = range(turn * microbatches, (turn + 1) * microbatches)
                pairs = [microbatch(tensors, n, job=job) for n in numbers]
                x, g = zip(*pairs, strict=True)
                fed = (torch.cat(x).to(device, dtype),) if rank == 0 else ()
                last = {"target": torch.cat(g).to(device, dtype)} if rank == ranks - 1 else {}
                y = pipeline.step(*fed, **last)
                for n, part in zip(numbers, y.chunk(microbatches) if last else (), strict=False):
                    keep(trace, run, "output", part.detach().flatten(0, -2), n)
                if job.optimizer:
                    step(trace, run, True, taps=taps)
        keep_state(trace, run, job=job)
        trace.results = in_order(trace.kept)
        return trace

    return on({"stage": ranks}, main)


def _sent_back(output: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor:
    """A loss with this gradient."""
    return (output.float() * grad_output.float()).sum()
