"""The shortest float8 training linear around torch's own scaled matrix multiply.

Not a library: it exists so that ``torch.nn.functional.scaled_mm`` and, as ``tensorwise_v1`` and
``rowwise_v1``, ``torch._scaled_mm`` are under test without one. Scales are fp32, s = max /
max(amax, 1e-12); every operand is quantised for its GEMM from high precision, amax taken over the
contracted axis (rowwise) or over the tensor. A stand-alone script carries this file's text, so it
imports torch and nothing else.
"""

import torch
import torch.nn.functional as F
from torch import nn


def quantise(
    x: torch.Tensor, dtype: torch.dtype, rowwise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, C] and fp32 inverse scales, [rows, 1] or a scalar, of ``x`` [rows, C]."""
    padded = F.pad(x.abs(), (0, 1, 0, 0 if rowwise else 1))  # so that the amax of no elements is 0
    amax = padded.amax(1, keepdim=True) if rowwise else padded.amax()
    largest = torch.finfo(dtype).max
    # the quotient in fp64, then one rounding: the same bits eager and compiled
    # a literal: Dynamo's dynamic shapes die on a global float that two autograd.Functions read
    scale = (largest / amax.double().clamp(min=1e-12)).float()
    codes = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return codes.contiguous(), scale.reciprocal()


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_dtype: torch.dtype,
    backend: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A @ B^T for A [R, C] and B [S, C]; the kernel wants B column-major, which B^T is."""
    rowwise = backend.startswith("rowwise")
    a_codes, a_scale = quantise(a, a_dtype, rowwise)
    b_codes, b_scale = quantise(b, torch.float8_e4m3fn, rowwise)
    b_scale = b_scale.t() if rowwise else b_scale
    if backend.endswith("_v1"):
        return torch._scaled_mm(
            a_codes, b_codes.t(), a_scale, b_scale, bias=bias, out_dtype=a.dtype
        )
    kind = F.ScalingType.RowWise if rowwise else F.ScalingType.TensorWise
    return F.scaled_mm(
        a_codes, b_codes.t(), a_scale, kind, b_scale, kind, bias=bias, output_dtype=a.dtype
    )


class scaled_linear(torch.autograd.Function):
    """output, grad_input and grad_weight, each by one scaled_mm."""

    @staticmethod
    def forward(ctx, x, weight, bias, backend):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.backend, ctx.has_bias = backend, bias is not None
        rows = x.flatten(0, -2)  # reshape(-1, 0) would be ambiguous
        # the kernel takes no bias where it returns fp32 (CUDA)
        inside = bias if x.dtype == torch.bfloat16 else None
        out = gemm(rows, weight, torch.float8_e4m3fn, backend, inside)
        if bias is not None and inside is None:
            out = out + bias
        return out  # [rows, N]: autograd forbids in-place changes of a view that a Function returns

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        rowwise = ctx.backend.startswith("rowwise")
        dtype = torch.float8_e4m3fn if rowwise else torch.float8_e5m2
        g = grad_output.flatten(0, -2)
        rows = x.flatten(0, -2)  # reshape(-1, 0) would be ambiguous
        grad_input = gemm(g, weight.t(), dtype, ctx.backend).reshape(x.shape)
        grad_weight = gemm(g.t(), rows.t(), dtype, ctx.backend)
        return grad_input, grad_weight, g.sum(0) if ctx.has_bias else None, None


class ScaledLinear(nn.Linear):
    """nn.Linear by ``scaled_linear``."""

    backend = "tensorwise"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = scaled_linear.apply(input, self.weight, self.bias, self.backend)  # type: ignore[no-untyped-call]
        return out.reshape(*input.shape[:-1], out.shape[-1])  # type: ignore[no-any-return]


def become_scaled(module: nn.Module, backend: str) -> None:
    """Turn a plain nn.Linear into a ScaledLinear in place: hooks, ties and attributes stay."""
    if type(module) is nn.Linear:
        module.__class__ = ScaledLinear
        module.backend = backend  # type: ignore[assignment]
