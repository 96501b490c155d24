"""A sliding window of tokens, and a learned sink for each head that takes part of the softmax."""

import torch
from torch import nn


def window_mask(t, window, device):
    i = torch.arange(t, device=device)
    distance = i[:, None] - i[None, :]
    return (distance >= 0) & (distance < window)


class SinkAttention(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window, self.scale = heads, window, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale
        mask = window_mask(t, self.window, x.device)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1).to(scores.dtype)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        y = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = SinkAttention(dim, heads, window)
        self.gate, self.up = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def build():
    model = nn.Sequential(Block(64, 2, window=8), Block(64, 2, window=64))
    return model.bfloat16(), torch.randn(2, 32, 64, dtype=torch.bfloat16)
