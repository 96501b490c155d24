"""A mixture of experts of one's own, as most are written: experts in a Python loop, or their
weights stacked and rows multiplied in groups.

    narrowfuzz check examples/own_model/experts.py:loop --recipe torchao.float8.rowwise
    narrowfuzz check examples/own_model/experts.py:grouped --checkpoint full
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN, EXPERTS, CHOSEN = 64, 128, 4, 2


class Expert(nn.Module):
    """A SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Loop(nn.Module):
    """Each expert gets the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            out.index_add_(0, row, expert(x[row]) * weights[row, slot, None])
        return out


class Grouped(nn.Module):
    """Rows are sorted by expert, and multiplied group by group."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * DIM**-0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * HIDDEN**-0.5)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * DIM**-0.5)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        offs = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        order = chosen.flatten().argsort(stable=True)
        row = order // CHOSEN
        h = F.silu(self.multiplied(x[row], self.w1, offs)) * self.multiplied(x[row], self.w3, offs)
        y = self.multiplied(h, self.w2, offs) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, row, y)

    def multiplied(self, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)


class Decoder(nn.Module):
    """Embedding, norm, routed experts beside a shared one, and a head."""

    def __init__(self, routed: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(EXPERTS * 16, DIM)
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.routed = routed
        self.shared = Expert()
        self.head = nn.Linear(DIM, EXPERTS * 16, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        h = self.norm(x).flatten(0, -2)
        weights, chosen = F.softmax(self.router(h).float(), dim=-1).topk(CHOSEN, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(h.dtype)
        return self.head(x + (self.routed(h, weights, chosen) + self.shared(h)).view_as(x))


def loop() -> tuple[nn.Module, torch.Tensor]:
    return Decoder(Loop()).bfloat16(), torch.randint(EXPERTS * 16, (2, 24))


def grouped() -> tuple[nn.Module, torch.Tensor]:
    return Decoder(Grouped()).bfloat16(), torch.randint(EXPERTS * 16, (2, 24))
