"""A selective state space whose time steps are a product with the weight first, as in Mamba."""

import torch
import torch.nn.functional as F
from torch import nn


class SelectiveScan(nn.Module):
    def __init__(self, dim, rank, states):
        super().__init__()
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.x_proj = nn.Linear(dim, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, dim)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.rank, self.states = rank, states
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(dim, 1)))
        self.D = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = F.silu(self.in_proj(x))
        dt, b, c = self.x_proj(x).split([self.rank, self.states, self.states], dim=-1)
        dt = self.dt_proj.weight @ dt.transpose(1, 2)
        dt = F.softplus(dt + self.dt_proj.bias[:, None]).transpose(1, 2)
        decay = torch.exp(-dt[..., None] * self.A_log.exp())
        gain = dt[..., None] * b[:, :, None] * x[..., None]
        state, seen = torch.zeros_like(gain[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + gain[:, t]
            seen.append((state * c[:, t, None]).sum(-1))
        return self.out_proj(torch.stack(seen, dim=1) + x * self.D)


def build():
    return SelectiveScan(32, 32, 16), torch.randn(2, 32, 32)
