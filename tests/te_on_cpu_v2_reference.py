"""What a GEMM should have given, in float64 from the operands that were observed."""

from __future__ import annotations

import torch
from te_on_cpu.environment import real_extension
from te_on_cpu.v2_native import listening_to_extension
from te_on_cpu.watch import Cast, Multiply, Update, listening

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23, torch.float16: 2.0**-11}


class Seen:
    """Copies of everything that passed."""

    def __enter__(self):
        self.events = []
        self._context = (listening_to_extension if real_extension() else listening)(self._keep)
        self._context.__enter__()
        return self

    def __exit__(self, *error):
        return self._context.__exit__(*error)

    def _keep(self, event):
        self.events.append(copied(event))

    @property
    def gemms(self):
        return [event for event in self.events if isinstance(event, Multiply)]

    @property
    def casts(self):
        return [event for event in self.events if isinstance(event, Cast)]

    @property
    def updates(self):
        return [event for event in self.events if isinstance(event, Update)]


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.dequantize() if type(value) is not torch.Tensor else value.detach().clone()
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(*(copied(getattr(value, n)) for n in value.__dataclass_fields__))
    return value


def values(operand):
    """float64 values of an operand."""
    if operand.format == "e2m1":
        return of_fp4(operand.data.double(), operand.scale_inv)
    if operand.format not in FP8:
        return operand.data.double()
    codes = operand.data.contiguous().view(FP8[operand.format]).double()
    if operand.scale_inv.dtype == torch.float32:
        return codes * spread(operand.scale_inv.double(), codes)
    units = torch.exp2(operand.scale_inv.double() - 127)
    axis = 1 if operand.scale_inv.shape[0] == codes.shape[0] else 0
    return codes * units.repeat_interleave(32, axis)


def of_fp4(codes, scales):
    """float64 values of NVFP4: a code's value times its block's E4M3 scale times the tensor's."""
    size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes.long() % 8]
    block = (scales & 255).byte().view(torch.float8_e4m3fn).double()
    amax = (scales >> 8).int().contiguous().view(torch.float32).double()
    units = block * amax / 2688
    for axis, length in enumerate(codes.shape):
        units = units.repeat_interleave(length // units.shape[axis], axis)
    return size * torch.where(codes > 7, -1, 1) * units


def spread(scales, matrix):
    """The scale of each element of a matrix: one for all, or one for each block of 1 x 128,
    128 x 1 or 128 x 128, the last of which may be incomplete."""
    if scales.dim() < 2:
        return scales
    for axis, size in enumerate(matrix.shape):
        if scales.shape[axis] != size:
            scales = scales.repeat_interleave(128, axis).narrow(axis, 0, size)
    return scales


def reference(gemm, bias=None):
    """(result, sum of magnitudes), both float64."""
    a, b = values(gemm.a), values(gemm.b)
    right = a.t() if gemm.layout[0] == "T" else a
    left = b.t() if gemm.layout[1] == "T" else b
    offset = 0 if bias is None else bias.detach().double()
    return left @ right + offset, left.abs() @ right.abs() + abs(offset)


def close(got, want, gemm=None):
    """Equal, or within the rounding of a sum in fp32 and of the result."""
    exact, magnitude = want if isinstance(want, tuple) else (want, want.abs() * 0)
    flat = got.detach().double().reshape(exact.shape)
    radius = magnitude * 1e-5 + exact.abs() * (ROUNDING[got.dtype] if gemm is not None else 0)
    assert (flat - exact).abs().le(radius + 1e-30).all(), (flat - exact).abs().max()
