"""Domain adaptation: an autograd.Function, the identity forward, turns gradients round."""

import torch
from torch import nn


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class DANN(nn.Module):
    def __init__(self, features=64, hidden=64, classes=32):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(features, hidden), nn.ReLU())
        self.label = nn.Linear(hidden, classes)
        self.domain = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 32))

    def forward(self, x):
        h = self.extractor(x)
        return {"label": self.label(h), "domain": self.domain(GradientReversal.apply(h, 0.3))}


def build():
    return DANN(), torch.randn(32, 64)
