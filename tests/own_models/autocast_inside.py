"""float32 parameters, and a forward that enters bf16 autocast by itself; the loss is float32."""

import torch
import torch.nn.functional as F
from torch import nn


class Regressor(nn.Module):
    def __init__(self, features=32, hidden=64):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, y):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = F.gelu(self.fc1(self.norm(x)))
            h = h + F.gelu(self.fc2(h))
            prediction = self.out(h).squeeze(-1)
        return F.smooth_l1_loss(prediction.float(), y.float()), prediction


def build():
    torch.manual_seed(0)
    return Regressor(), (torch.randn(64, 32), torch.randn(64))
