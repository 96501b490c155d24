"""Learned queries that read a sequence through nn.MultiheadAttention, which returns its weights."""

import torch
from torch import nn


class Resampler(nn.Module):
    def __init__(self, dim=64, queries=8, heads=4):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, dim) * 0.02)
        self.norm_q, self.norm_kv = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x):
        q = self.norm_q(self.queries).expand(x.shape[0], -1, -1)
        kv = self.norm_kv(x)
        y, weights = self.attention(q, kv, kv, need_weights=True)
        y = q + y
        return y + self.feed_forward(y), weights


def build():
    return Resampler(), torch.randn(2, 32, 64)
