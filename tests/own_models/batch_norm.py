"""A network with BatchNorm in training mode: each forward moves its running statistics."""

import torch
from torch import nn


def build():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 8 * 8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, torch.randn(16, 1, 8, 8)


def frozen():
    """In eval mode, as when a backbone is fine-tuned with frozen statistics."""
    model, example = build()
    return model.eval(), example
