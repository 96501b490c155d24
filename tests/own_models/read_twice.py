"""A residual block that reads its input twice: where FSDP shards it, its two gradients are added up
before that of the residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Trunk(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.register_buffer("fixed", torch.randn(dim, dim) / dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.softplus(self.up(x))) + F.linear(x, self.fixed.to(x.dtype))


class Trunks(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Trunk(dim) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def build() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Trunks().bfloat16(), torch.randn(32, 32, dtype=torch.bfloat16)
