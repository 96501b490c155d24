"""LayerScale and DeepNorm: each branch is scaled by a vector that starts at 1e-5."""

import torch
import torch.nn.functional as F
from torch import nn


class LayerScale(nn.Module):
    def __init__(self, dim, init=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, heads, depth):
        super().__init__()
        self.heads, self.alpha = heads, (2 * depth) ** 0.25
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.ls1, self.ls2 = LayerScale(dim), LayerScale(dim)

    def attention(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(y.transpose(1, 2).reshape(b, t, d))

    def forward(self, x):
        x = self.norm1(self.alpha * x + self.ls1(self.attention(x)))
        return self.norm2(self.alpha * x + self.ls2(self.fc2(F.gelu(self.fc1(x)))))


def build():
    return nn.Sequential(*(Block(64, 4, 2) for _ in range(2))), torch.randn(2, 32, 64)
