"""The product of two matrices from the operands that a kernel is given: codes and inverse scales,
or plain values.

A compiler that fuses everything else leaves these products of a linear layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics import bounds, reference
from narrowfuzz.numerics.accumulator import UNKNOWN, Accumulators
from narrowfuzz.numerics.formats import F32, F64, FORMATS, decode
from narrowfuzz.numerics.plan import HIGH_PRECISION, GemmPlan
from narrowfuzz.operators.operator import Expected
from narrowfuzz.trace.trace import Multiplied, Seen

#: The plan of any such kernel: two inverse scales, each rounded and applied.
_KERNEL = GemmPlan(HIGH_PRECISION, HIGH_PRECISION, scale_roundings=4)


def expected(one: Multiplied, accumulators: Accumulators) -> Expected:
    """A @ B^T of the operands that the kernel got, plus the bias, within bound 3.2."""
    a, b = dequantised(one.a), dequantised(one.b)
    centre = reference.product(a, b)
    radius = _radius(accumulators, one, a, b)
    with np.errstate(all="ignore"):
        unknown = _may_overflow(one, a, b) | np.isnan(centre)
        if one.bias is None:
            lo, hi = bounds.interval(centre, radius, _KERNEL, one.dtype)
        else:
            bias = np.ascontiguousarray(np.broadcast_to(one.bias, centre.shape))
            unknown |= ~np.isfinite(bias)
            lo, hi = _with_bias(one, centre, radius, bias)
    return Expected(centre, radius, lo, hi, unknown)


def dequantised(seen: Seen) -> F64:
    """An operand as the kernel reads it: codes times inverse scales, or plain values."""
    if seen.codes is None:
        assert seen.values is not None
        return seen.values.astype(np.float64)
    assert seen.scale is not None and seen.scale_is_inverse
    with np.errstate(all="ignore"):
        return decode(seen.codes, FORMATS[seen.format]) * seen.scale.astype(np.float64)


def _radius(accumulators: Accumulators, one: Multiplied, a: F64, b: F64) -> F64:
    """Bound 3.2; for FP8 the larger of those with and without fast accumulation, because it is not
    known which one was requested."""
    kinds = (one.dtype,) if one.a.codes is None else ("fp8", "fp8 fast")
    least = _least(one.a, one.dtype), _least(one.b, one.dtype)
    gemms = [replace(_KERNEL, accumulator=accumulators.get(kind, UNKNOWN)) for kind in kinds]
    return np.asarray(np.max([bounds.gemm_radius(a, b, gemm, least) for gemm in gemms], axis=0))


def _least(seen: Seen, dtype: str) -> F64 | float:
    """The smallest normal number of each row, as the kernel reads it."""
    if seen.codes is None:
        return FORMATS[dtype].min_normal
    assert seen.scale is not None
    unit = np.broadcast_to(seen.scale.astype(np.float64), seen.codes.shape)
    return np.asarray(FORMATS[seen.format].min_normal * np.max(unit, axis=1, initial=0.0))


def _may_overflow(one: Multiplied, a: F64, b: F64) -> NDArray[np.bool_]:
    """Elements whose sums, or sums with only one operand's scale applied, may leave the range."""
    limit = FORMATS[one.dtype].max * 0.5
    risky = ~(np.abs(a) @ np.abs(b).T < limit)
    for seen, other, axis in ((one.b, a, 1), (one.a, b, 0)):
        if seen.codes is not None:
            reach = np.abs(other).sum(axis=1) * FORMATS[seen.format].max
            risky |= np.expand_dims(~(reach < limit), axis)
    return np.asarray(risky)


def _with_bias(one: Multiplied, centre: F64, radius: F64, bias: F32) -> tuple[F64, F64]:
    """addmm adds the bias before it rounds, or rounds, adds and rounds again: the hull of both."""
    lo, hi = bounds.interval(centre, radius, _KERNEL, one.dtype, bias=bias)
    fused = bounds.fused_bias_radius(centre, radius, bias, _contracted(one.a))
    low, high = bounds.interval(
        centre, fused.reshape(centre.shape), bounds.unrounded(_KERNEL), one.dtype, bias=bias
    )
    return np.minimum(lo, low), np.maximum(hi, high)


def _contracted(seen: Seen) -> int:
    array = seen.codes if seen.codes is not None else seen.values
    assert array is not None
    return int(array.shape[1])
