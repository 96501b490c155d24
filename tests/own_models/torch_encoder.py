"""torch's own TransformerEncoder with a padding mask, pre-norm and a learned class token."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, features=32, dim=64, heads=4, depth=2, classes=32):
        super().__init__()
        self.project = nn.Linear(features, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(
            dim, heads, dim_feedforward=128, dropout=0.0, activation="gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x, padding):
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.project(x)], dim=1)
        padding = torch.cat([padding.new_zeros(len(x), 1), padding], dim=1)
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(x[:, 0])


def build():
    lengths = torch.tensor([15, 9, 4])
    padding = torch.arange(15) >= lengths[:, None]
    return Classifier(), (torch.randn(3, 15, 32), padding)
