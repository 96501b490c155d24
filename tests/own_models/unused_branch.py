"""Two heads, of which a configuration switches one off: its parameters get no gradient."""

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, observations=48, hidden=64, actions=6, use_value_head=False):
        super().__init__()
        self.use_value_head = use_value_head
        self.body = nn.Sequential(
            nn.Linear(observations, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, observation):
        h = self.body(observation)
        mean = self.policy(h)
        std = self.log_std.exp().expand_as(mean)
        if self.use_value_head:
            return mean, std, self.value(h)
        return mean, std


def build():
    return Policy(), torch.randn(32, 48)
