"""A critic of a Wasserstein GAN that returns its scores and the penalty of its gradients."""

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.score = nn.Linear(hidden, 32)

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            scores = self.score(self.layers(x))
            (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores, (slope.norm(dim=-1) - 1).square()


def build():
    return Critic(64, 64), torch.randn(32, 64)
