"""ALiBi: a float bias that falls with distance is added to the scores, the future is -inf."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def slopes(heads):
    start = 2 ** (-8 / heads)
    return torch.tensor([start ** (i + 1) for i in range(heads)])


class AlibiAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)
        self.register_buffer("slopes", slopes(heads), persistent=False)

    def bias(self, t, device, dtype):
        position = torch.arange(t, device=device)
        distance = position[None, :] - position[:, None]
        bias = self.slopes.to(device)[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, -math.inf)
        return bias.to(dtype)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            p(x).view(b, t, self.heads, -1).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        bias = self.bias(t, x.device, q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.dense(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = AlibiAttention(dim, heads)
        self.ln_2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


def build():
    block = nn.Sequential(Block(64, 4), Block(64, 4))
    return block.to(torch.bfloat16), torch.randn(2, 32, 64, dtype=torch.bfloat16)
