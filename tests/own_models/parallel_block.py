"""GPT-J and PaLM: attention beside the feed-forward, from one fused linear, with norms on q, k."""

import torch
import torch.nn.functional as F
from torch import nn


class ParallelBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads, self.sizes = heads, (dim, dim, dim, hidden, hidden)
        self.norm = nn.LayerNorm(dim, bias=False)
        self.fused = nn.Linear(dim, sum(self.sizes), bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        self.out = nn.Linear(dim + hidden, dim, bias=False)

    def forward(self, x):
        q, k, v, gate, up = self.fused(self.norm(x)).split(self.sizes, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        y = y.transpose(1, 2).flatten(-2)
        return x + self.out(torch.cat([y, F.silu(gate) * up], dim=-1))


def build():
    model = nn.Sequential(ParallelBlock(64, 2, 128), ParallelBlock(64, 2, 128))
    return model.bfloat16(), torch.randn(2, 32, 64, dtype=torch.bfloat16)
