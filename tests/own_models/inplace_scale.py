"""A feed-forward of 3-D input that scales what its linears return in place, to save memory."""

import torch
from torch import nn


class FeedForward(nn.Module):
    def __init__(self, dim, hidden, scale):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.scale = scale

    def forward(self, x):
        y = self.up(x)
        y *= self.scale
        return self.down(torch.sin(y))


def build():
    return FeedForward(32, 64, 2.0), torch.randn(2, 16, 32)
