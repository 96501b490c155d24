"""Wrong casts: wrong rounding, wrong special values, and codes that depend on other elements."""

from __future__ import annotations

from typing import Any

from narrowfuzz.plants.patching import float8_cast, float8_operand
from narrowfuzz.plants.plant import Plant

_FLOAT8 = ("torchao.float8.*",)


def _truncate(x: Any) -> Any:
    """Clear the significand bits that E4M3 does not have, so that the cast has nothing to round."""
    import torch

    return (x.contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)


def _upwards(x: Any) -> Any:
    return x + x.abs() * 0.04


def _no_nan(x: Any) -> Any:
    return x.nan_to_num(nan=0.0)


def _swap_two(x: Any) -> Any:
    """Exchange the neighbouring E4M3 values 96 and 104."""
    import torch

    low, high = (x.abs() > 92) & (x.abs() < 100), (x.abs() > 100) & (x.abs() < 108)
    return torch.where(low, 104.0 * x.sign(), torch.where(high, 96.0 * x.sign(), x))


def _shrink(x: Any) -> Any:
    return x * 0.9


def _sees_neighbours(x: Any) -> Any:
    return x + 0.05 * x.nan_to_num().mean(-1, keepdim=True)


def _flush(x: Any) -> Any:
    import torch

    return torch.where(x.abs() < 0.125, torch.zeros_like(x), x)


PLANTS = [
    Plant("cast-truncates", "rounding mode", "cast rounds towards zero",
          "https://github.com/tenstorrent/tt-metal/issues/51971", _FLOAT8,
          lambda: float8_cast(_truncate)),
    Plant("cast-rounds-upwards", "rounding mode", "cast favours positive values",
          "https://github.com/flashinfer-ai/flashinfer/issues/4160", _FLOAT8,
          lambda: float8_cast(_upwards)),
    Plant("cast-swallows-nan", "special values", "a NaN input counts as 0",
          "https://github.com/triton-lang/triton/pull/10778", _FLOAT8,
          lambda: float8_operand("input", _no_nan)),
    Plant("cast-swaps-codes", "rounding mode", "two neighbouring codes are exchanged",
          "https://github.com/triton-lang/triton/pull/11784", _FLOAT8,
          lambda: float8_cast(_swap_two)),
    Plant("cast-shrinks", "gain", "data shrinks by 10 % before the cast",
          "https://github.com/ROCm/rocm-libraries/pull/11003", _FLOAT8,
          lambda: float8_cast(_shrink)),
    Plant("cast-sees-neighbours", "granule", "codes depend on the row's mean",
          "https://github.com/pytorch/ao/pull/4186", _FLOAT8,
          lambda: float8_cast(_sees_neighbours)),
    Plant("input-flushed", "underflow", "input elements below 1/8 are dropped",
          "https://github.com/pytorch/pytorch/issues/195007", _FLOAT8,
          lambda: float8_operand("input", _flush)),
    Plant("weight-flushed", "underflow", "weight elements below 1/8 are dropped",
          "https://github.com/pytorch/pytorch/issues/195007", _FLOAT8,
          lambda: float8_operand("weight", _flush)),
    Plant("gradient-flushed", "underflow", "gradient elements below 1/8 are dropped",
          "https://github.com/pytorch/pytorch/issues/195007", _FLOAT8,
          lambda: float8_operand("grad_output", _flush)),
]  # fmt: skip
