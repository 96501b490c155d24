"""Models of other kinds: LoRA beside frozen weights, and convolutions with a LayerNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from llama import Block  # beside this file
from torch import nn


class LoRA(nn.Module):
    """A frozen linear with a trained low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class Pictures(nn.Module):
    """Convolution, pooling, LayerNorm and a linear; it returns two tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16 * 8 * 8)
        self.head = nn.Linear(16 * 8 * 8, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = F.max_pool2d(F.gelu(self.conv(x)), 2).flatten(1)
        return {"logits": self.head(self.norm(hidden)), "hidden": hidden}


def lora() -> tuple[nn.Module, torch.Tensor]:
    block = Block(64, 128, 2)
    block.attention.wq = LoRA(block.attention.wq, 16)
    block.attention.wv = LoRA(block.attention.wv, 16)
    return block.to(torch.bfloat16), torch.zeros(2, 32, 64, dtype=torch.bfloat16)


def pictures() -> tuple[nn.Module, torch.Tensor]:
    return Pictures(), torch.zeros(4, 3, 16, 16)
