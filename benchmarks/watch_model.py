"""A small model sharded over four ranks, FSDP2 and tensor parallelism 2 x 2. The ranks are threads
of this process, or torchrun's processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from narrowfuzz.play.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

RANKS, DIM, TOKENS, STEPS = 4, 16, 8, 3
_BUILDING = threading.Lock()


class Block(nn.Module):
    """A block like Llama's, with attention of two heads."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        scores = (q @ k.transpose(-1, -2)) / self.width**0.5
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=x.dtype).triu(1)
        mixed = (scores + mask).softmax(-1) @ v
        x = x + self.wo(mixed.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Model(nn.Module):
    """Two blocks and an output layer."""

    def __init__(self, dim: int = DIM, heads: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


_PLAN: dict[str, Any] = {
    "wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(),
    "wo": RowwiseParallel(), "w1": ColwiseParallel(), "w3": ColwiseParallel(),
    "w2": RowwiseParallel(),
}  # fmt: skip


def train(dtype: torch.dtype, around: Callable[[int], AbstractContextManager[Any]]) -> list[float]:
    """Train three steps on this rank, inside the context ``around(rank)``. Returns the losses."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with _BUILDING:  # the ranks share the process's random generator
        torch.manual_seed(0)
        model = Model()
        draw = torch.Generator().manual_seed(1 + mesh.get_local_rank("dp"))
        data = [torch.randn(2, TOKENS, DIM, generator=draw) for _ in range(STEPS)]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], _PLAN)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    losses = []
    with around(rank):
        for x in data:
            loss = model(x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def threads(run: Callable[[], Any]) -> list[Any]:
    """Run ``run`` on four ranks of a threaded process group. Returns each rank's result."""
    return on_ranks({"ranks": RANKS}, lambda rank, mesh: run())
