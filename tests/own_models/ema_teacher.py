"""BYOL: a teacher that is a moving average of the student, updated between steps by the trainer."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class BYOL(nn.Module):
    def __init__(self, dim=64, hidden=64, out=32, decay=0.99):
        super().__init__()
        self.decay = decay
        self.student = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, out))
        self.predictor = nn.Sequential(nn.Linear(out, hidden), nn.ReLU(), nn.Linear(hidden, out))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update_teacher(self):
        """Called by the trainer after each optimizer step."""
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            t.lerp_(s, 1 - self.decay)
        self.updates += 1

    def forward(self, a, b):
        online = self.predictor(self.student(a))
        with torch.no_grad():
            target = self.teacher(b)
        loss = 2 - 2 * F.cosine_similarity(online, target.detach(), dim=-1)
        return loss.mean(), online


def build():
    torch.manual_seed(0)
    return BYOL(), (torch.randn(32, 64), torch.randn(32, 64))
