"""A Llama block and a small Llama of one's own, as `narrowfuzz check` takes them.

    narrowfuzz check examples/own_model/llama.py:block --recipe torchao.float8.rowwise \\
        --compile inductor --checkpoint selective
    narrowfuzz check examples/own_model/llama.py:whole --recipe torchao.mxfp8.rceil
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(w(x)) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(-2))

    def split(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, dim: int, hidden: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, hidden, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embeddings(ids)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def block() -> tuple[nn.Module, torch.Tensor]:
    """A module, and what it is called with: shapes and dtype are taken from that."""
    return Block(64, 128, 2).to(torch.bfloat16), torch.zeros(2, 32, 64, dtype=torch.bfloat16)


def whole() -> tuple[nn.Module, torch.Tensor]:
    """From token ids: blocks in a ModuleList are recomputed one by one."""
    return Llama(256, 64, 128, 2, 2).to(torch.bfloat16), torch.randint(256, (2, 32))
