"""Other experts: Switch (k = 1, capacity, two more losses), expert choice, and einsum over all."""

import torch
import torch.nn.functional as F
from torch import nn


class Switch(nn.Module):
    """k = 1; tokens beyond an expert's capacity are dropped; a balancing and a z-loss."""

    def __init__(self, dim=64, hidden=96, experts=4, factor=1.25):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            for _ in range(experts)
        )
        self.factor = factor

    def forward(self, x):
        b, s, d = x.shape
        flat = x.reshape(-1, d)
        logits = self.gate(flat).float()
        probs = logits.softmax(-1)
        gate, index = probs.max(-1)
        n = len(self.experts)
        onehot = F.one_hot(index, n)
        place = (onehot.cumsum(0) - 1).gather(1, index[:, None]).squeeze(1)
        fits = place < int(self.factor * len(flat) / n)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = torch.nonzero((index == e) & fits).squeeze(1)
            y = y.index_add(0, rows, expert(flat[rows]) * gate[rows, None].to(x.dtype))
        aux = n * (onehot.float().mean(0) * probs.mean(0)).sum()
        z = torch.logsumexp(logits, -1).square().mean()
        return x + y.reshape(b, s, d), aux, z


class Choice(nn.Module):
    """Experts choose tokens: topk over tokens, gather, bmm, scatter_add."""

    def __init__(self, dim=64, hidden=96, experts=4, factor=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)
        self.factor = factor

    def forward(self, x):
        b, s, d = x.shape
        flat = x.reshape(-1, d)
        scores = self.gate(flat).float().softmax(-1)
        k = self.factor * len(flat) // self.w1.shape[0]
        g, rows = scores.t().topk(k, dim=-1)
        taken = flat[rows]
        h = F.silu(torch.bmm(taken, self.w1))
        out = torch.bmm(h, self.w2) * g[..., None].to(x.dtype)
        y = torch.zeros_like(flat).index_add(0, rows.reshape(-1), out.reshape(-1, d))
        return x + y.reshape(b, s, d)


class Einsum(nn.Module):
    """GShard's dense dispatch and combine by einsum, top 2."""

    def __init__(self, dim=64, hidden=64, experts=4):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        top, idx = p.topk(2, -1)
        w = torch.zeros_like(p).scatter(-1, idx, top / top.sum(-1, keepdim=True))
        h = F.relu(torch.einsum("bsd,edh->besh", x, self.up)).square()
        return x + torch.einsum("besh,ehd,bse->bsd", h, self.down, w)


def made(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), kind()).bfloat16(), (torch.randn(2, 32, 64).bfloat16(),)


def switch():
    return made(Switch)


def choice():
    return made(Choice)


def einsum():
    return made(Einsum)
