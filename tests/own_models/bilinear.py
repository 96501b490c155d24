"""A scorer of pairs: each side through its own tower, then nn.Bilinear."""

import torch
from torch import nn


class PairScorer(nn.Module):
    def __init__(self, left=32, right=64, dim=32, relations=4):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(left, dim), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(right, dim), nn.ReLU())
        self.score = nn.Bilinear(dim, dim, relations)

    def forward(self, a, b):
        return self.score(self.left(a), self.right(b))


def build():
    return PairScorer(), (torch.randn(32, 32), torch.randn(32, 64))
