"""The reference of a quantised GEMM, executed from its plan.

Four steps, each usable alone so that a rule can start from what was *observed*: amax of each
granule, scale from amax, codes from scale, values from codes. All operands are in canonical
orientation: [rows, C] with the contracted axis last.

An *as-built deviation* is a named, documented departure of a released library from the plan. With
one switched on, ``codes`` and ``scale_allowed`` follow the library instead, so a known bug can be
counted as known while every other rule stays sharp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics import hadamard, scales, two_level
from narrowfuzz.numerics.formats import (
    E8M0_NAN,
    F32,
    F64,
    FORMATS,
    Codes,
    decode,
    encode,
    neighbours,
    round_to,
)
from narrowfuzz.numerics.plan import (
    OPERANDS,
    Fp32Scale,
    GemmPlan,
    MxScale,
    OperandPlan,
    Role,
    TwoLevelScale,
)

#: fp32 multiplicative scales, E8M0 bytes, or two_level.TWO_LEVEL records.
Scale = NDArray[Any]

DEVIATIONS = {
    "pow2_floor_by_log2": "floor(log2(s)) in fp32: just below a power of two the scale rounds up",
    "rceil_by_log2": "ceil(log2(amax/max)) in fp32: just above max * 2^k the byte is one too small",
    "mx_byte0_times_one": "MX scale byte 0 multiplies the data by 1 instead of 2^127",
    "mx_byte0_min_normal": "MX scale byte 0 divides the data by 2^-126 but stores 2^-127",
}


@dataclass(frozen=True)
class Quantised:
    """One operand: amax and scale per granule, codes and dequantised values per element."""

    amax: F32
    scale: Scale
    codes: Codes
    values: F64


def canonical_operands(
    role: Role, tensors: dict[str, NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """A and B of ``role`` from the 2-D tensors input, weight and grad_output."""
    (a, a_t), (b, b_t) = OPERANDS[role]
    return (tensors[a].T if a_t else tensors[a]), (tensors[b].T if b_t else tensors[b])


def transformed(x: F32, plan: OperandPlan) -> F32:
    """The operand as it is quantised: after the plan's Hadamard transform, if it has one."""
    return hadamard.transform(x, plan.hadamard) if plan.hadamard else x


class Undivided(ValueError):
    """A shape that a plan's blocks do not divide: the plan says nothing about it."""


def amax(x: F32, plan: OperandPlan) -> F32:
    """max|x| of each granule: shape () for tensor, [rows, 1] for row, [rows, C/block] for block,
    [rows/block, C/block] for tile.

    NaN propagates; an empty granule has amax 0. Raises Undivided if C, or rows for tile, is not a
    multiple of block.
    """
    magnitude = np.abs(x)
    if plan.granularity == "tensor":
        return np.asarray(np.max(magnitude, initial=0.0), dtype=np.float32)
    if plan.granularity == "row":
        return np.asarray(np.max(magnitude, axis=1, keepdims=True, initial=0.0), dtype=np.float32)
    rows, contracted = x.shape
    if contracted % plan.block:
        raise Undivided(f"contracted dimension {contracted} is not a multiple of {plan.block}")
    height = plan.block if plan.granularity == "tile" else 1
    if rows % height:
        raise Undivided(f"{rows} rows are not a multiple of {height}")
    blocked = magnitude.reshape(rows // height, height, contracted // plan.block, plan.block)
    return np.asarray(np.max(blocked, axis=(1, 3), initial=0.0), dtype=np.float32)


def scale(amax_: F32, plan: OperandPlan) -> Scale:
    """The scale the plan's rule gives for each granule's amax."""
    assert plan.format is not None
    if isinstance(plan.scale, MxScale):
        return scales.mx_scale(amax_, plan.format, plan.scale.mode, inf_byte=plan.scale.inf_byte)
    if isinstance(plan.scale, TwoLevelScale):
        return two_level.two_level_scale(amax_, plan.scale.arithmetic, eps=plan.scale.eps)
    assert isinstance(plan.scale, Fp32Scale)
    s = scales.max_over_amax(amax_, plan.format, eps=plan.scale.eps)
    return scales.pow2_floor(s) if plan.scale.power_of_two else s


def scale_as_built(amax_: F32, plan: OperandPlan, deviation: str) -> Scale | None:
    """The scale that ``deviation`` allows beside the rule's, the rule's own for a granule where
    there is none; None if it has no say."""
    assert plan.format is not None
    if isinstance(plan.scale, MxScale):
        if deviation == "rceil_by_log2" and plan.scale.mode == "rceil":
            rule = scale(amax_, plan)
            other = scales.mx_rceil_by_log2(amax_, plan.format)
            return np.where(np.isfinite(amax_) & (amax_ > 0), other, rule)
        return None
    if isinstance(plan.scale, TwoLevelScale):
        return None
    assert isinstance(plan.scale, Fp32Scale)
    if deviation != "pow2_floor_by_log2" or not plan.scale.power_of_two:
        return None
    raw = scales.max_over_amax(amax_, plan.format, eps=plan.scale.eps)
    above = scales.pow2_floor_by_log2(raw)
    return np.where(above > 0, above, scale(amax_, plan))


def spread(per_granule: NDArray[Any], plan: OperandPlan) -> NDArray[Any]:
    """Broadcast a per-granule array so that it lines up with the elements."""
    if plan.block:
        per_granule = np.repeat(per_granule, plan.block, axis=1)
    return np.repeat(per_granule, plan.block, axis=0) if plan.granularity == "tile" else per_granule


def granule(index: tuple[int, ...], plan: OperandPlan) -> tuple[int, ...]:
    """Index of the scale of an element; () where a tensor has one."""
    if plan.granularity == "tensor":
        return ()
    if plan.granularity == "row":
        return (index[0], 0)
    rows = plan.block if plan.granularity == "tile" else 1
    return (index[0] // rows, index[1] // plan.block)


def by_granule(x: NDArray[Any], plan: OperandPlan) -> NDArray[Any]:
    """The elements of each granule as one row."""
    if plan.granularity == "row":
        return x
    if plan.granularity == "tensor":
        return x.reshape(1, -1)
    if plan.granularity == "block":
        return x.reshape(-1, plan.block)
    tall, wide = x.shape[0] // plan.block, x.shape[1] // plan.block
    squares = x.reshape(tall, plan.block, wide, plan.block).swapaxes(1, 2)
    return squares.reshape(tall * wide, -1)


def codes(x: F32, scale_: Scale, plan: OperandPlan, *, deviation: str = "") -> Codes:
    """Quantise ``x`` with the given (possibly observed) scales: one fp32 product, one cast to
    nearest."""
    assert plan.format is not None
    return encode(_scaled(x, scale_, plan, deviation), plan.format, overflow=plan.overflow)


def admissible(x: F32, scale_: Scale, plan: OperandPlan) -> tuple[Codes, Codes]:
    """The two codes a stochastic cast may return, lower value first; equal where x needs no
    rounding."""
    assert plan.format is not None
    low, high = neighbours(_scaled(x, scale_, plan, ""), plan.format)
    return encode(low, plan.format), encode(high, plan.format)


def _scaled(x: F32, scale_: Scale, plan: OperandPlan, deviation: str) -> F64 | F32:
    assert plan.format is not None
    with np.errstate(all="ignore"):
        if isinstance(plan.scale, MxScale):
            assert scale_.dtype == np.uint8
            return np.asarray(x / spread(_mx_divisor(scale_, deviation), plan), dtype=np.float64)
        if isinstance(plan.scale, TwoLevelScale):
            factor = spread(two_level.multiplier(scale_, plan.scale.arithmetic), plan)
            # E2M1 has no NaN: under a NaN scale the codes mean nothing
            scaled = np.asarray(x * factor, dtype=np.float32)
            return np.where(np.isnan(scaled), np.float32(0.0), scaled)
        return np.asarray(x * spread(scale_, plan), dtype=np.float32)


def meaningless(scale_: Scale, plan: OperandPlan) -> NDArray[Any]:
    """Elements under a NaN scale that their codes need not repeat."""
    if isinstance(plan.scale, MxScale):
        return np.asarray(spread(scale_, plan) == E8M0_NAN)
    if isinstance(plan.scale, TwoLevelScale):
        return np.asarray(np.isnan(spread(two_level.unit(scale_), plan)))
    return np.zeros((), dtype=bool)


def _mx_divisor(byte: NDArray[Any], deviation: str) -> F64:
    factor = scales.mx_factor(byte)
    if deviation == "mx_byte0_times_one":
        return np.where(byte == 0, 1.0, factor)
    if deviation == "mx_byte0_min_normal":
        return np.where(byte == 0, 2.0**-126, factor)
    return factor


def values(codes_: Codes, scale_: Scale, plan: OperandPlan) -> F64:
    """What the codes stand for: code / s, or code * X; exact up to float64 rounding."""
    assert plan.format is not None
    decoded = decode(codes_, plan.format)
    with np.errstate(all="ignore"):
        if isinstance(plan.scale, MxScale):
            assert scale_.dtype == np.uint8
            return np.asarray(decoded * spread(scales.mx_factor(scale_), plan))
        if isinstance(plan.scale, TwoLevelScale):
            return np.asarray(decoded * spread(two_level.unit(scale_), plan))
        return np.asarray(decoded / spread(scale_, plan).astype(np.float64))


def quantise(x: F32, plan: OperandPlan) -> Quantised | None:
    """All four steps on an operand transformed already; None where the plan quantises nothing."""
    if plan.format is None:
        return None
    a = amax(x, plan)
    s = scale(a, plan)
    c = codes(x, s, plan)
    return Quantised(a, s, c, values(c, s, plan))


def multiplied(values_: F64, gemm: GemmPlan, dtype: str) -> F64:
    """The operand as it enters the multiply: rounded where the plan dequantises it first.

    Quotients and products round to fp32's or the dtype's *range* (a value may overflow to Inf); the
    relative rounding to fp32 is left to bound 3.2, which counts it.
    """
    if gemm.dequantise_to == "dtype":
        return round_to(values_, FORMATS[dtype], overflow="ieee")
    if gemm.dequantise_to == "fp32":
        return round_to(values_, FORMATS["fp32"], overflow="ieee")
    return values_


def product(a: F64, b: F64) -> F64:
    """A @ B^T in float64. Inf and NaN take part: an Inf that meets a 0 must come out as NaN."""
    with np.errstate(all="ignore"):
        return np.asarray(a @ b.swapaxes(-1, -2))
