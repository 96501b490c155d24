"""Gemma 2: embeddings times sqrt(dim), norms before and after, scores and logits through a tanh."""

import torch
import torch.nn.functional as F
from torch import nn


def softcap(x, cap):
    return cap * torch.tanh(x / cap)


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.weight.float())).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, heads, window=None):
        super().__init__()
        self.heads, self.window = heads, window
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        scores = softcap(q @ k.mT * (d // self.heads) ** -0.5, 50.0)
        i = torch.arange(t, device=x.device)
        hidden = i[None, :] > i[:, None]
        if self.window is not None:
            hidden |= i[None, :] <= i[:, None] - self.window
        scores = scores.float().masked_fill(hidden, float("-inf"))
        y = scores.softmax(-1).to(v.dtype) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.attn = Attention(dim, heads, window)
        self.gate, self.up = (
            nn.Linear(dim, 2 * dim, bias=False),
            nn.Linear(dim, 2 * dim, bias=False),
        )
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.pre_attn, self.post_attn = GemmaRMSNorm(dim), GemmaRMSNorm(dim)
        self.pre_ffn, self.post_ffn = GemmaRMSNorm(dim), GemmaRMSNorm(dim)

    def forward(self, x):
        x = x + self.post_attn(self.attn(self.pre_attn(x)))
        h = self.pre_ffn(x)
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return x + self.post_ffn(h)


class Gemma(nn.Module):
    def __init__(self, vocab=256, dim=64, heads=2):
        super().__init__()
        self.dim = dim
        self.embedder = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, 8), Layer(dim, heads, None)])
        self.norm = GemmaRMSNorm(dim)

    def forward(self, ids):
        x = self.embedder(ids) * torch.tensor(self.dim**0.5, dtype=self.embedder.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        # the head is the embedding itself, there is no linear for it
        return softcap(self.norm(x) @ self.embedder.weight.t(), 30.0)


def build():
    return Gemma().bfloat16(), torch.randint(256, (2, 32))
