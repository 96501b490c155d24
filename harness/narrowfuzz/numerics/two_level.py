"""NVFP4's two-level scale: an E4M3 code for each block, one fp32 number for the tensor.

    g     = fp32(amax / (448 * 6))                      amax of the tensor
    block = E4M3(clamp(amax_block / 6 / g, eps, 448))   eps = 2^-6, E4M3's smallest normal
    x     = code * block * g

A scale is a record (block code, amax of the tensor), so that either library arithmetic can be
reproduced. Sources: torchao 0.18 ``mx_formats/nvfp4_tensor.py`` nvfp4_quantize ("decode") and
``nvfp4_training/hadamard_utils.py`` _nvfp4_quantize ("encode"); TransformerEngine 2.20.2
``common/cast/nvfp4/core_nvfp4.cuh`` ("folded", without eps).

>>> scale = two_level_scale(np.float32([[6.0, 3.0]]), "decode", eps=2.0**-6)
>>> decode(scale["block"], E4M3FN).tolist()
[[448.0, 224.0]]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.formats import E2M1, E4M3FN, F32, F64, Format, decode, encode
from narrowfuzz.numerics.scales import Scale, ScaleRule, Spread

#: "decode": quotients by g. "encode": products with 2688 / amax and its reciprocal; "folded": the
#: same, and of a block's amax with 2688 / amax times 1 / 6, rounded.
Arithmetic = Literal["decode", "encode", "folded"]
TWO_LEVEL = np.dtype([("block", np.uint8), ("amax", np.float32)])


@dataclass(frozen=True)
class TwoLevelScale(ScaleRule):
    """An E4M3 code per granule times one fp32 number for the tensor (NVFP4)."""

    eps: float
    arithmetic: Arithmetic
    whole: ClassVar[bool] = True

    @property
    def roundings(self) -> int:
        return {"decode": 3, "encode": 6, "folded": 6}[self.arithmetic]

    def of(self, amax: F32, fmt: Format) -> Scale:
        return two_level_scale(amax, self.arithmetic, eps=self.eps)

    def scaled(self, x: F32, scale: Scale, spread: Spread, deviation: str) -> F64 | F32:
        return np.asarray(x * spread(multiplier(scale, self.arithmetic)), dtype=np.float32)

    def unit(self, scale: Scale) -> F64:
        return unit(scale)

    def bounded(self, scale: Scale) -> F64:
        finite = np.isfinite(multiplier(scale, self.arithmetic))
        return np.where(finite, unit(scale), np.inf)


_REACH = np.float32(E4M3FN.max * E2M1.max)
_LARGEST = np.finfo(np.float32).max


def two_level_scale(block_amax: F32, arithmetic: Arithmetic, *, eps: float) -> NDArray[Any]:
    """One record per block. The tensor's amax is the largest block's; NaN propagates.

    A tensor of zeros gets the smallest block scale: its codes and values are 0.
    """
    amax = np.max(block_amax, initial=0.0).astype(np.float32)
    with np.errstate(all="ignore"):
        raw = block_amax / np.float32(E2M1.max)
        if amax == 0:
            raw = np.zeros_like(raw)
        elif arithmetic == "decode":
            raw = raw / (amax / _REACH)
        elif arithmetic == "folded":
            raw = block_amax * (_encode_tensor(amax) * (np.float32(1.0) / np.float32(E2M1.max)))
        else:
            raw = raw * _encode_tensor(amax)
        block = encode(np.clip(raw, np.float32(eps), np.float32(E4M3FN.max)), E4M3FN)
    scale = np.empty(block_amax.shape, dtype=TWO_LEVEL)
    scale["block"], scale["amax"] = block, amax
    return scale


def multiplier(scale: NDArray[Any], arithmetic: Arithmetic) -> F32:
    """The factor by which data is multiplied before the cast, in the library's order of roundings.

    With "decode", Inf where 1/g leaves fp32's range (amax below 2^-116), as in the library.
    """
    block = decode(scale["block"], E4M3FN).astype(np.float32)
    with np.errstate(all="ignore"):
        if arithmetic == "decode":
            factor = (np.float32(1.0) / (scale["amax"] / _REACH)) / block
        else:
            back = np.float32(1.0) / _encode_tensor(scale["amax"])
            factor = np.minimum(np.float32(1.0) / (block * back), _LARGEST)
    return np.where(scale["amax"] == 0, np.float32(0.0), factor).astype(np.float32)


def unit(scale: NDArray[Any]) -> F64:
    """The value that a code of 1 represents: block * g, exact in float64."""
    tensor = (scale["amax"] / _REACH).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(decode(scale["block"], E4M3FN) * tensor)


def _encode_tensor(amax: Any) -> Any:
    factor = np.minimum(_REACH / np.where(amax == 0, np.float32(1.0), amax), _LARGEST)
    return np.where((amax == 0) | (factor == 0), np.float32(1.0), factor).astype(np.float32)
