"""A weight that a parametrization computes with a buffer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize


class Masked(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(dim, dim) > 0.5).float())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


class Sparse(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        parametrize.register_parametrization(self.first, "weight", Masked(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def build() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Sparse(), torch.randn(32, 32)
