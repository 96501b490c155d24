"""Conversions between Triton's number formats with the results of an NVIDIA GPU (PTX ISA, ``cvt``).

The interpreter stores bf16 in arrays of uint16 and FP8 in arrays of uint8; fp16, fp32 and fp64 are
numpy's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

Stored = NDArray[Any]
#: Triton's formats and the same formats of torch.
TORCH: dict[Any, torch.dtype] = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_FP8 = (tl.float8e4nv, tl.float8e5)
_UNSIGNED = {1: torch.uint8, 2: torch.uint16}
#: Size of a format in bytes -> the integers of that size, the largest of which is the NaN's bits.
_NAN = {size: torch.iinfo(getattr(torch, f"int{8 * size}")) for size in (1, 2, 4, 8)}
#: ``satfinite``: larger magnitudes become these, infinities included.
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}


def is_stored(dtype: Any) -> bool:
    """True if the interpreter stores numbers of this format as integers: bf16 and FP8."""
    return dtype == tl.bfloat16 or dtype in _FP8


def tensor_of(x: Stored, dtype: Any) -> torch.Tensor:
    """A copy as a torch tensor of the same format, with at least one dimension."""
    flat = torch.from_numpy(np.array(np.atleast_1d(x), order="C"))
    return flat.view(TORCH[dtype])


def stored(x: torch.Tensor, like: Stored) -> Stored:
    """``x`` in the interpreter's storage format, in the shape of ``like``."""
    whole = x.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    made: Stored = (x.view(_UNSIGNED[x.element_size()]) if whole else x).numpy()
    return made.reshape(np.shape(like))


def as_fp32(x: Stored, dtype: Any) -> NDArray[np.float32]:
    """Numbers of a narrower format as fp32, which represents them exactly."""
    return np.asarray(stored(tensor_of(x, dtype).float(), x), dtype=np.float32)


def converted(x: Stored, source: Any, target: Any, *, to_zero: bool = False) -> Stored:
    """Numbers converted to another format, rounded to nearest, ties to even, or ``to_zero``.

    FP8 saturates (``cvt.rn.satfinite``). NaN becomes the NaN of the format whose bits are all 1
    except the sign; from bf16 to fp32 it keeps its bits. From E5M2 to bf16, infinity and NaN become
    numbers, as Triton only rebiases the exponent: infinity becomes 65,536 (seen on an H200 with
    Triton 3.6; in fp16 and fp32 it is infinity). Raises NotImplementedError for ``to_zero`` to
    E4M3.
    """
    if source == tl.float8e5 and target == tl.bfloat16:
        return _moved_exponents(x)
    if to_zero and target == tl.float8e4nv:
        raise NotImplementedError("no GPU rounds to E4M3 toward zero: Triton refuses it as well")
    wide = tensor_of(x, source)
    if source == tl.bfloat16 and target == tl.float32:
        return stored(wide.float(), x)
    if to_zero:
        made = _cut(wide, target)
    else:
        if target in _FP8:
            wide = wide.float() if source != tl.float64 else wide
            wide = wide.clamp(-_LARGEST[target], _LARGEST[target])
        made = wide.to(TORCH[target])
    one = _NAN[made.element_size()]
    whole = getattr(torch, one.dtype)
    bits = torch.where(wide.isnan(), torch.full((), one.max, dtype=whole), made.view(whole))
    return stored(bits.view(made.dtype), x)


def _moved_exponents(x: Stored) -> Stored:
    """E5M2 in bf16, where the largest exponent means a number like any other."""
    code = np.atleast_1d(x).astype(np.int64)
    exponent, mantissa = (code >> 2) & 31, code & 3
    normal = np.ldexp(1.0 + mantissa / 4.0, exponent - 15)
    value = np.where(exponent == 0, np.ldexp(mantissa / 4.0, -14), normal)
    value = np.where(code & 128, -value, value)
    return stored(torch.from_numpy(value).to(torch.bfloat16), x)


def _cut(wide: torch.Tensor, target: Any) -> torch.Tensor:
    """``wide`` rounded toward zero: the nearest number, or its neighbour toward zero where the
    nearest has the larger magnitude. Finite numbers beyond the largest one become that;
    infinities stay."""
    nearest = wide.to(TORCH[tl.float16 if target == tl.float8e5 else target])
    step = torch.where(wide.isnan() | (nearest.abs().double() <= wide.abs().double()), 0, 1)
    bits = nearest.view(torch.int16) - step.to(torch.int16)
    if target == tl.float8e5:  # the upper half of fp16
        return (bits.view(torch.uint16).to(torch.int32) >> 8).to(torch.uint8).view(TORCH[target])
    return bits.view(TORCH[target])
