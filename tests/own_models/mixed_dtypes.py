"""bf16 linears, but norms and the router in float32, as many training codes keep them."""

import torch
import torch.nn.functional as F
from torch import nn


class Fp32LayerNorm(nn.LayerNorm):
    def forward(self, x):
        y = F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.type_as(x)


class Gated(nn.Module):
    """Two branches, mixed by a router that works in float32."""

    def __init__(self, dim):
        super().__init__()
        self.norm = Fp32LayerNorm(dim)
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.router = nn.Linear(dim, 2)

    def forward(self, x):
        h = self.norm(x)
        weight = self.router(h.float()).softmax(-1).type_as(x)
        return x + weight[..., :1] * F.silu(self.a(h)) + weight[..., 1:] * F.gelu(self.b(h))


def build():
    model = nn.Sequential(Gated(64), Gated(64)).bfloat16()
    for module in model.modules():
        if isinstance(module, Fp32LayerNorm):
            module.float()
        if isinstance(module, Gated):
            module.router.float()
    return model, torch.randn(2, 32, 64, dtype=torch.bfloat16)
