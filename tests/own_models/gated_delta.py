"""Gated DeltaNet as a loop over tokens, its state in float32, with short convolutions and a gated
RMSNorm; it returns a NamedTuple."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Out(NamedTuple):
    hidden: torch.Tensor
    state: torch.Tensor


def l2norm(x, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


class GatedDeltaNet(nn.Module):
    def __init__(self, dim=64, heads=2, conv=4):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.a_proj, self.b_proj = (
            nn.Linear(dim, heads, bias=False),
            nn.Linear(dim, heads, bias=False),
        )
        self.g_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.conv = nn.Conv1d(3 * dim, 3 * dim, conv, groups=3 * dim, padding=conv - 1)
        self.norm = nn.RMSNorm(self.hd, eps=1e-5)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        qkv = F.silu(self.conv(qkv.transpose(1, 2))[..., :t].transpose(1, 2))
        q, k, v = (u.reshape(b, t, self.heads, self.hd).float() for u in qkv.chunk(3, -1))
        q, k = l2norm(q) * self.hd**-0.5, l2norm(k)
        beta = self.b_proj(x).float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias)
        S = x.new_zeros(b, self.heads, self.hd, self.hd, dtype=torch.float32)
        outs = []
        for i in range(t):
            S = S * g[:, i].exp()[..., None, None]
            kv = (S * k[:, i, :, :, None]).sum(-2)
            delta = (v[:, i] - kv) * beta[:, i, :, None]
            S = S + k[:, i, :, :, None] * delta[:, :, None, :]
            outs.append((S * q[:, i, :, :, None]).sum(-2))
        o = torch.stack(outs, 1).to(x.dtype)
        gate = self.g_proj(x).view(b, t, self.heads, self.hd)
        o = self.norm(o) * F.silu(gate)
        return Out(x + self.o_proj(o.flatten(-2)), S)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([GatedDeltaNet(), GatedDeltaNet()])
        self.lm_head = nn.Linear(64, 96, bias=False)

    def forward(self, x):
        states = []
        for layer in self.layers:
            x, s = layer(x)
            states.append(s)
        return Out(self.lm_head(x), torch.stack(states))


def build():
    torch.manual_seed(0)
    return Stack().bfloat16(), torch.randn(2, 16, 64, dtype=torch.bfloat16)
