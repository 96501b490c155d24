"""The library in this example: a team's own FP8 linear, in one file of plain torch.

Each tensor has one scale. Products are of dequantised operands, in fp32.
"""

from __future__ import annotations

import torch
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantise(x, dtype):
    """The codes of a tensor, and the scale s that it was multiplied by."""
    amax = x.float().abs().amax() if x.numel() else x.new_zeros((), dtype=torch.float32)
    scale = torch.finfo(dtype).max / amax.clamp(min=1e-12)
    return (x.float() * scale).to(dtype), scale


def product(a, a_scale, b, b_scale, dtype):
    """a [M, K] @ b [N, K]^T of the values of codes."""
    return ((a.float() / a_scale) @ (b.float() / b_scale).t()).to(dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        a, a_scale = quantise(x.flatten(0, -2), E4M3)
        b, b_scale = quantise(weight, E4M3)
        ctx.save_for_backward(a, a_scale, b, b_scale)
        ctx.shape = x.shape
        return product(a, a_scale, b, b_scale, x.dtype).reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad_output):
        a, a_scale, b, b_scale = ctx.saved_tensors
        g, g_scale = quantise(grad_output.flatten(0, -2), E5M2)
        grad_input = product(g, g_scale, b.t(), b_scale, grad_output.dtype)
        grad_weight = product(g.t(), g_scale, a.t(), a_scale, grad_output.dtype)
        return grad_input.reshape(ctx.shape), grad_weight


class Fp8Linear(nn.Linear):
    """nn.Linear whose products are of FP8 codes. The bias is added in the model's dtype."""

    def forward(self, x):
        y = _Products.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


def convert(model):
    """Make every linear of a model an FP8 linear, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
    return model
