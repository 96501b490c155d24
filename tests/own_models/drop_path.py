"""A small vision transformer that skips whole branches at random in training."""

import torch
import torch.nn.functional as F
from torch import nn


def drop_path(x, p, training):
    if p == 0.0 or not training:
        return x
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    return x * keep / (1 - p)


class Block(nn.Module):
    def __init__(self, dim, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attention(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for t in self.qkv(x).chunk(3, dim=-1))  # fmt: skip
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    def forward(self, x):
        x = x + drop_path(self.attention(self.norm1(x)), self.p, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.p, self.training)


class ViT(nn.Module):
    def __init__(self, image=16, patch=4, dim=64, depth=3, heads=2, classes=10, rate=0.1):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, dim))
        rates = torch.linspace(0, rate, depth).tolist()
        self.blocks = nn.ModuleList([Block(dim, heads, p) for p in rates])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build():
    return ViT(), torch.randn(4, 3, 16, 16)
