"""Simulates a Hopper GPU on the CPU: CUDA's names, its FP8 multiply with its rejections, and its
accumulator.

The accumulator is mmaemu's, which returns an H100 PCIe's bits (https://github.com/astding/mmaemu)
for tensorwise scales without a bias. This module adds other scales, the bias, and a split of K that
depends on the shape. All else runs as on the CPU. Simulation cannot be undone in a process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from narrowfuzz.machine.simulated_memory import guard, uncounted

#: Numbers of parts into which K may be split, along tiles of 128; the shape picks one that fits.
_SPLITS = (1, 2, 3, 4)
_TILE = 128
_ALIGNMENT = 16


def simulate() -> None:
    """Make this process one that has a simulated Hopper GPU. This cannot be undone."""
    from te_on_cpu.cuda_names import patch

    if getattr(torch.cuda, "is_simulated", False):
        return
    patch()
    guard()
    torch._scaled_mm = scaled_mm
    F.scaled_mm = partial(_by_kind, F.scaled_mm)
    cpu: Any = torch.autocast

    class Autocast(cpu):  # type: ignore[misc]
        def __init__(self, device_type: str, *args: Any, **kw: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kw)

    torch.autocast = torch.amp.autocast = Autocast  # type: ignore[misc]
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    changes = {
        "is_autocast_enabled": lambda device_type="cuda": enabled("cpu"),
        "get_autocast_dtype": lambda device_type: dtype("cpu"),
        "get_autocast_gpu_dtype": lambda: dtype("cpu"),
    }
    for name, change in changes.items():
        setattr(torch, name, change)
    setattr(torch.cuda, "is_simulated", True)  # noqa: B010 - unknown to the type checker


def _by_kind(original: Any, *given: Any, **options: Any) -> torch.Tensor:
    """``F.scaled_mm`` for one scale per tensor or per row; all other calls go to the ``original``,
    which runs on the CPU."""
    a, b, a_scale, a_kind, b_scale, b_kind, *more = given
    known = (F.ScalingType.TensorWise, F.ScalingType.RowWise)
    others = options.keys() - {"bias", "output_dtype", "use_fast_accum"}
    if more or others or a_kind not in known or b_kind not in known:
        return original(*given, **options)  # type: ignore[no-any-return]
    return scaled_mm(
        a,
        b,
        a_scale,
        b_scale,
        bias=options.get("bias"),
        out_dtype=options.get("output_dtype", torch.bfloat16),
        use_fast_accum=options.get("use_fast_accum", False),
    )


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """As ``torch._scaled_mm`` on Hopper. Raises RuntimeError or ValueError for what that rejects.

    Source: aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """
    dtype = out_dtype or a.dtype
    _check(a, b, bias, dtype)
    with torch.no_grad(), uncounted():
        tiles = a.shape[1] // _TILE
        parts = [s for s in _SPLITS if s <= max(1, tiles)]
        split = parts[(a.shape[0] // _ALIGNMENT + b.shape[1] // _ALIGNMENT) % len(parts)]
        total = accumulate(a, b.t(), fast=use_fast_accum, split=split)
        y = scaled(total, scale_a, scale_b)
        if bias is not None:
            y = y + bias.float()
        return y.to(dtype)


def accumulate(a: torch.Tensor, b: torch.Tensor, *, fast: bool, split: int) -> torch.Tensor:
    """The fp32 product [M, N] of the codes a [M, K] and b [N, K], with K in ``split`` parts."""
    import mmaemu

    return mmaemu.accumulate(  # type: ignore[no-any-return]
        a,
        b,
        use_fast_accum=fast,
        profile="hopper",
        splitk=1 if split == 1 else (split, "contiguous"),
    )


def scaled(total: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """The sums with the inverse scales applied: one after the other for scales of rows, and
    multiplied with each other first for scales of tensors."""
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        return total * scale_a * scale_b
    return total * (scale_a * scale_b)


def _check(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    if a.shape[1] % _ALIGNMENT:
        raise RuntimeError(
            f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: "
            f"({a.shape[0]}x{a.shape[1]})."
        )
    if b.shape[1] % _ALIGNMENT:
        raise RuntimeError(f"mat2 shape ({b.shape[0]}x{b.shape[1]}) must be divisible by 16")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
    if bias is not None and dtype == torch.float32:
        raise RuntimeError("Bias is not supported when out_dtype is set to Float32")
