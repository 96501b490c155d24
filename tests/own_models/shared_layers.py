"""ALBERT's idea: one block, used three times, and an embedding that is narrower than the block."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def attend(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for w in (self.q, self.k, self.v))  # fmt: skip
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Albert(nn.Module):
    def __init__(self, vocab=256, narrow=32, dim=64, heads=2, times=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab, narrow)
        self.widen = nn.Linear(narrow, dim)
        self.block = Block(dim, heads)
        self.times = times
        self.pooler = nn.Linear(dim, dim)

    def forward(self, ids):
        x = self.widen(self.embedding(ids))
        for _ in range(self.times):
            x = self.block(x)
        return x, torch.tanh(self.pooler(x[:, 0]))


def build():
    return Albert().bfloat16(), torch.randint(256, (2, 32))
