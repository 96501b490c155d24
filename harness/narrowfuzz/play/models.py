"""The modules of models: plain torch with plain arguments, and nothing of this package.

A stand-alone script is written from this source, so a class may use only torch, ``math``, ``F``,
``nn``, classes of this file and the contents of ``groups.py``. Every linear that a recipe may
convert is an ``nn.Linear``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from narrowfuzz.play.groups import grouped


class OneLinear(nn.Module):
    """One linear inside a container, so that the layer has a name."""

    def __init__(self, dim: int, out: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, out, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


class GeluMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias)
        self.down = nn.Linear(hidden, dim, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    """w2(silu(w1(x)) * w3(x))."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias)
        self.w2 = nn.Linear(hidden, dim, bias)
        self.w3 = nn.Linear(dim, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class NormLinear(nn.Module):
    """A linear behind a normalisation."""

    def __init__(self, norm: str, dim: int, out: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5) if norm == "rms" else nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, out, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x))


class Attention(nn.Module):
    """Causal self-attention; ``fused`` False spells it out as matmuls and a softmax."""

    def __init__(self, dim: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batched = x if x.dim() == 3 else x.unsqueeze(0)
        q, k, v = (self.split(w(batched)) for w in (self.wq, self.wk, self.wv))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=x.device)
            scores = scores.masked_fill(future.triu(1), float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.wo(y.transpose(1, 2).reshape(batched.shape)).reshape(x.shape)

    def split(self, t: torch.Tensor) -> torch.Tensor:
        """[batch, rows, dim] -> [batch, heads, rows, dim / heads]."""
        return t.reshape(*t.shape[:2], self.heads, -1).transpose(1, 2)


class LlamaBlock(nn.Module):
    """Pre-norm attention and SwiGLU with residuals."""

    def __init__(self, dim: int, hidden: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, fused)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = SwiGLU(dim, hidden, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class TwoBlocks(nn.Module):
    """Two Llama blocks, so that a recomputed block follows another one."""

    def __init__(self, dim: int, hidden: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaBlock(dim, hidden, heads, fused) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Router(nn.Module):
    """The ``top_k`` experts of each row, and their weights, which add up to 1. The router's weight
    is not in a linear: filters of conversions skip routers."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(experts, dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.softmax(F.linear(x, self.weight).float(), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen


class BalancedRouter(Router):
    """A router that balances its experts, as in DeepSeek-V3: a bias helps to choose experts, but
    does not change their weights; the rows of each expert are counted; and an auxiliary loss adds
    to the gradient, but not to the output."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__(dim, experts, top_k)
        self.register_buffer("bias", torch.linspace(-0.125, 0.125, experts))
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.linear(x, self.weight).float().sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        rows = (chosen[..., None] == torch.arange(len(self.bias), device=x.device)).sum((0, 1))
        if self.training:
            with torch.no_grad():
                self.counts.add_(rows)
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        loss = (scores.mean(0) * rows).sum() / max(chosen.numel(), 1)
        return (weights + (loss - loss.detach())).to(x.dtype), chosen


class LoopedExperts(nn.Module):
    """A mixture of experts, one after the other: each gets the rows that chose it, if any, padded
    with zeros to whole blocks of ``block`` rows."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int, block: int) -> None:
        super().__init__()
        self.block = block
        self.router = Router(dim, experts, top_k)
        self.experts = nn.ModuleList(SwiGLU(dim, hidden, False) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            padded = F.pad(rows[row], (0, 0, 0, -len(row) % self.block))
            y = y.index_add(0, row, expert(padded)[: len(row)] * weights[row, slot, None])
        return y.reshape(x.shape)


class Experts(nn.Module):
    """The weights of all experts, each a SwiGLU: [experts, outputs, features]. Whether a weight is
    laid out over ranks is decided by its type or, with ``asks``, by its methods, as in trainers."""

    def __init__(self, dim: int, hidden: int, experts: int, asks: bool = False) -> None:
        super().__init__()
        self.local = local if asks else local_of_type
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden))
        self.w3 = nn.Parameter(torch.randn(experts, hidden, dim))

    def forward(self, rows: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
        """Outputs for rows in groups that end at ``offs``, one group per expert, or without it for
        [experts, rows, features]. If ranks share the experts, those of this rank."""
        w1, w2, w3 = (self.local(w) for w in (self.w1, self.w2, self.w3))
        h = F.silu(expert_products(rows, w1, offs)) * expert_products(rows, w3, offs)
        return expert_products(h, w2, offs)


class GroupedExperts(nn.Module):
    """A mixture of experts whose rows are sorted by expert and multiplied in groups, plus an expert
    that all rows share. ``before``: rows are weighted before they are multiplied."""

    def __init__(
        self, dim: int, hidden: int, experts: int, top_k: int, before: bool, asks: bool = False
    ) -> None:
        super().__init__()
        self.before = before
        self.router = Router(dim, experts, top_k)
        self.experts = Experts(dim, hidden, experts, asks)
        self.shared = SwiGLU(dim, hidden, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        sent, offs, *back = self.routed(rows)
        return self.combined(rows, self.experts(sent, offs), *back).reshape(x.shape)

    def routed(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows for the experts, sorted by expert; where each expert's rows end; and for each of
        these rows its original index and its weight."""
        weights, chosen = self.router(rows)
        of_expert = chosen.flatten()
        numbers = torch.arange(len(self.router.weight), device=rows.device)
        offs = (of_expert[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
        order = of_expert.argsort(stable=True)
        row, weight = order // chosen.shape[1], weights.flatten()[order, None]
        return rows[row] * weight if self.before else rows[row], offs, row, weight

    def combined(
        self, rows: torch.Tensor, h: torch.Tensor, row: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """The experts' outputs, added up in their original rows, plus the shared expert's."""
        y = torch.zeros_like(rows).index_add(0, row, h if self.before else h * weight)
        return y + self.shared(rows)


class BalancedExperts(GroupedExperts):
    """``GroupedExperts`` with a router that balances them."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__(dim, hidden, experts, top_k, False)
        self.router = BalancedRouter(dim, experts, top_k)


class CapacityExperts(nn.Module):
    """A mixture of experts that take equally many rows each, a quarter more than an equal share:
    rows beyond these are dropped."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = Router(dim, experts, 1)
        self.experts = Experts(dim, hidden, experts)
        self.shared = SwiGLU(dim, hidden, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows)
        experts = len(self.router.weight)
        share = -(-len(rows) * 5 // (4 * experts))
        capacity = share + -share % 8
        goes = chosen == torch.arange(experts, device=x.device)
        place = (goes.cumsum(0) * goes).sum(1) - 1
        # rows that are dropped share a place behind all others
        nowhere = experts * capacity
        slot = torch.where(place < capacity, chosen[:, 0] * capacity + place, nowhere)
        taken = rows.new_zeros(nowhere + 1, rows.shape[1]).index_add(0, slot, rows)[:-1]
        y = self.experts(taken.view(experts, capacity, -1), None).flatten(0, 1)
        y = torch.cat([y, y.new_zeros(1, y.shape[1])]).index_select(0, slot)
        return (y * weights + self.shared(rows)).reshape(x.shape)


def local(weight: Any) -> torch.Tensor:
    """This rank's part of a weight that ranks share, or all of it."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def local_of_type(weight: Any) -> torch.Tensor:
    """The same, decided by the weight's type: compiled code does not see a DTensor's methods."""
    from torch.distributed.tensor import DTensor  # which takes a while to load

    return weight.to_local() if isinstance(weight, DTensor) else weight


def expert_products(
    rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor | None
) -> torch.Tensor:
    """Rows in groups that end at ``offs``, or [experts, rows, features], times each group's
    transposed matrix. torch's kernel takes rows of whole 16 bytes, hence the padding with zeros."""
    outputs, features = weights.shape[1:]
    if features % 8 or outputs % 8:
        rows = F.pad(rows, (0, -features % 8))
        weights = F.pad(weights, (0, -features % 8, 0, -outputs % 8))
    return grouped(rows, weights.transpose(1, 2), offs)[..., :outputs].to(rows.dtype)


class TiedHead(nn.Module):
    """Token ids -> embedding -> linear -> norm -> head, whose weight is the embedding's."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.proj(self.embedding(ids))))


class DroppedOut(nn.Module):
    """down(dropout(gelu(up(x))))."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias)
        self.dropout = nn.Dropout(0.25)
        self.down = nn.Linear(hidden, dim, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(F.gelu(self.up(x))))


class UsedTwice(nn.Module):
    """One linear called twice in a forward."""

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.relu(self.proj(x)))


class FrozenFirst(nn.Module):
    """The first linear does not train; the second does."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(dim, hidden, bias)
        self.first.requires_grad_(False)
        self.second = nn.Linear(hidden, dim, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


class Hooked(nn.Module):
    """A linear that carries a user's hooks and attributes."""

    def __init__(self, dim: int, out: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, out, bias)
        self.proj.gain = 2.0
        self.proj.register_forward_pre_hook(self.halve_input)
        self.proj.register_forward_hook(self.double_output)

    @staticmethod
    def halve_input(module: Any, args: Any) -> Any:
        return (args[0] * 0.5, *args[1:])

    @staticmethod
    def double_output(module: Any, args: Any, output: Any) -> Any:
        return output * module.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


class GainLinear(nn.Linear):
    """A linear with a forward of its own."""

    gain = 2.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.gain


class OwnForward(nn.Module):
    """A model whose linear is a subclass of nn.Linear."""

    def __init__(self, dim: int, out: int, bias: bool) -> None:
        super().__init__()
        self.proj = GainLinear(dim, out, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)
