"""A model as users have them, with an ``autograd.Function`` of its own, for ``test_rules.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, which keeps its arguments and nothing else."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return grad * up * (s + gate * s * (1 - s)), grad * gate * s


class FeedForward(nn.Module):
    """w2(silu(w1(x)) * w3(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = SwiGLUFunction.apply(self.w1(x), self.w3(x))
        return self.w2(y)


def build() -> tuple[nn.Module, torch.Tensor]:
    """The model, and what it is called with."""
    return FeedForward(32, 64).bfloat16(), torch.zeros(2, 16, 32, dtype=torch.bfloat16)
