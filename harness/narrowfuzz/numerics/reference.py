"""The reference of a quantised GEMM, executed from its plan.

Four steps, each usable by itself so that a rule can start from *observed* values: amax of each
granule, scale from amax, codes from scale, values from codes. All operands are in canonical
orientation: [rows, C] with the contracted axis last.

An *as-built deviation* is a named, documented departure of a released library from the plan. With
one switched on, ``codes`` and ``scale_allowed`` follow the library instead, so a known bug can be
counted as known while every other rule stays sharp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics import hadamard
from narrowfuzz.numerics.formats import (
    F32,
    F64,
    FORMATS,
    Codes,
    decode,
    encode,
    neighbours,
    round_to,
)
from narrowfuzz.numerics.plan import OPERANDS, GemmPlan, OperandPlan, Role
from narrowfuzz.numerics.scales import Scale

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
    """Raised for an operand whose shape the plan's blocks do not divide: the plan does not define
    it."""


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
    assert plan.format is not None and plan.scale is not None
    return plan.scale.of(amax_, plan.format)


def scale_as_built(amax_: F32, plan: OperandPlan, deviation: str) -> Scale | None:
    """The scale of each granule that ``deviation`` allows besides the rule's own, or the rule's own
    where it allows no other; None if the deviation does not concern this rule."""
    assert plan.format is not None and plan.scale is not None
    return plan.scale.as_built(amax_, plan.format, deviation)


def broadcast_granules(per_granule: NDArray[Any], plan: OperandPlan) -> NDArray[Any]:
    """Broadcast a per-granule array so that it lines up with the elements."""
    if plan.block:
        per_granule = np.repeat(per_granule, plan.block, axis=1)
    return np.repeat(per_granule, plan.block, axis=0) if plan.granularity == "tile" else per_granule


def granule(index: tuple[int, ...], plan: OperandPlan) -> tuple[int, ...]:
    """Index of the scale of an element; () if the tensor has a single scale."""
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
    assert plan.format is not None and plan.scale is not None
    with np.errstate(all="ignore"):
        scaled = plan.scale.scaled(x, scale_, partial(broadcast_granules, plan=plan), deviation)
    if plan.format.nan_code is None:  # without a NaN code, codes under a NaN scale mean nothing
        return np.where(np.isnan(scaled), scaled.dtype.type(0.0), scaled)
    return scaled


def meaningless(scale_: Scale, plan: OperandPlan) -> NDArray[Any]:
    """Mask of the elements whose codes mean nothing, because their scale is NaN
    (``ScaleRule.void``)."""
    assert plan.format is not None and plan.scale is not None
    return broadcast_granules(plan.scale.void(scale_, plan.format), plan)


def values(codes_: Codes, scale_: Scale, plan: OperandPlan) -> F64:
    """The values that the codes represent: code / s, or code * X; exact up to float64 rounding."""
    assert plan.format is not None and plan.scale is not None
    with np.errstate(all="ignore"):
        return plan.scale.values(
            decode(codes_, plan.format), scale_, partial(broadcast_granules, plan=plan)
        )


def quantise(x: F32, plan: OperandPlan) -> Quantised | None:
    """All four steps for an operand that is already transformed; None if the plan quantises
    nothing."""
    if plan.format is None:
        return None
    a = amax(x, plan)
    s = scale(a, plan)
    c = codes(x, s, plan)
    return Quantised(a, s, c, values(c, s, plan))


def multiplied(values_: F64, gemm: GemmPlan, dtype: str) -> F64:
    """The operand as it enters the multiply: rounded where the plan dequantises it first.

    Quotients and products round to fp32's or the dtype's *range* (a value may overflow to Inf);
    bound 3.2 accounts for the relative error of the rounding to fp32.
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
