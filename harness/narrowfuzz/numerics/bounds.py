"""Proven error bounds of a quantised GEMM; none of them has a constant to tune.

Bounds 3.1 to 3.3 are listed in docs/rules.md: 3.1 is ``quantise_bound``, 3.2 ``gemm_radius`` and
3.3 ``layer_radius``.

Notation: u_q unit roundoff of the element format, eta half its smallest subnormal, s the
multiplicative scale, u = 2^-24 of the fp32 accumulator, gamma_n = n u / (1 - n u).
Sources: Higham, "Accuracy and Stability", section 3.1; Blanchard, Higham, Lopez, Mary, Pranesh 2020
(block FMA); Mary and Mikaitis 2025 (narrow range).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32, gamma, sum_radius
from narrowfuzz.numerics.formats import F32, F64, FORMATS, Format, round_to
from narrowfuzz.numerics.plan import GemmPlan, OperandPlan, Rounding
from narrowfuzz.numerics.reference import broadcast_granules
from narrowfuzz.numerics.scales import Scale

#: A kernel may treat subnormal operands as zero and flush subnormal sums (VDPBF16PS does, GPUs do).
FLUSH32 = 2.0**-126
#: bf16's significand with float64's exponent range: for a rounding to bf16 before scales are
#: applied.
_BF16_WIDE = Format("bf16 before scaling", 11, 7, 1023, "ieee")


def quantise_bound(x: F32, scale_: Scale, plan: OperandPlan) -> F64:
    """Bound 3.1, per element: an upper bound of |Q(x) - x| for the given scales.

    Proof. In range, one rounding of v = x*s errs by at most u_q/(1+u_q) |v| (normal) or eta
    (subnormal); divide by s. The fp32 product before the cast adds a relative u, hence the u|x|
    term (and a subnormal product adds 2^-150, far below eta). Past the largest finite value the
    element saturates, so its error is |x| - max/s exactly.

    A stochastic cast moves v by less than one spacing, twice the terms: 2 u_q |v| or 2 eta. Under a
    two-level scale (k = ``plan.scale.roundings``) the multiplier equals 1/unit only up to k - 1
    fp32 roundings, so v is within gamma_k of x / unit: the error is at most (slope (1 + gamma_k) +
    gamma_k) |x|. Where that multiplier left fp32's range, the bound is infinite.
    """
    assert plan.format is not None and plan.scale is not None
    fmt = plan.format
    u_q, spacings = fmt.unit_roundoff, 0.5
    slope, roundings = u_q / (1.0 + u_q), U32
    if plan.rounding == "stochastic":
        slope, spacings = 2.0 * u_q, 1.0
    if plan.scale.roundings:
        roundings = gamma(plan.scale.roundings) * (1.0 + slope)
    with np.errstate(all="ignore"):
        unit = broadcast_granules(plan.scale.bounded(scale_), plan)
        magnitude = np.abs(x, dtype=np.float64)
        in_range = np.maximum(slope * magnitude, spacings * fmt.min_subnormal * unit)
        overshoot = magnitude - fmt.max * unit
        return np.asarray(np.maximum(in_range, overshoot) + roundings * magnitude)


def gemm_radius(
    a: F64,
    b: F64,
    gemm: GemmPlan,
    least: tuple[F64 | float, F64 | float] = (0.0, 0.0),
    total: F64 | None = None,
) -> F64:
    """Bound 3.2: the largest possible distance of the accumulator from A @ B^T of the operands that
    were actually observed.

    ``least``: the smallest normal number of each row of A and of B, to which the accumulator
    aligns; ``total``: |A||B|^T, if the caller has it already.

    Proof. The products are exact, and the accumulator errs as ``accumulator.sum_radius`` proves, in
    any order and blocking; each of the c roundings of scales, operands or products adds at most u
    |A||B|^T to first order. Scales of blocks are applied to partial sums: every product still
    passes through the same c roundings, so the count is the same.
    A number below fp32's normal numbers may be rounded to a multiple of 2^-149 or flushed: at most
    2^-126 for each of K products (or, where those are products of codes and far above, for each of
    their scaled partial sums) and for each of K sums, and 2^-126 times the other operand's element
    for each element of an operand: the last term.
    """
    with np.errstate(all="ignore"):
        radius = sum_radius(a, b, gemm.accumulator, gemm.scale_roundings, least, total)
        rows_a = np.abs(a).sum(axis=-1)[..., :, None]
        rows_b = np.abs(b).sum(axis=-1)[..., None, :]
        return np.asarray(radius + FLUSH32 * (2 * a.shape[-1] + rows_a + rows_b))


def layer_radius(
    a: F32,
    b: F32,
    bound_a: F64 | float,
    bound_b: F64 | float,
    gemm: GemmPlan,
    least: tuple[F64 | float, F64 | float] = (0.0, 0.0),
) -> F64:
    """Bound 3.3: distance of the accumulator from the *unquantised* product.

    Proof. With |A' - A| <= D_A and |B' - B| <= D_B elementwise, |A'B' - AB| <= (|A|+D_A)(|B|+D_B)
    - |A||B|; bound 3.2 on the enlarged operands covers the accumulator.
    """
    with np.errstate(all="ignore"):
        size_a, size_b = np.abs(a, dtype=np.float64), np.abs(b, dtype=np.float64)
        wide_a, wide_b = size_a + bound_a, size_b + bound_b
        enlarged = wide_a @ wide_b.swapaxes(-1, -2)
        quantisation = enlarged - size_a @ size_b.swapaxes(-1, -2)
    return np.asarray(quantisation + gemm_radius(wide_a, wide_b, gemm, least, enlarged))


def interval(
    centre: F64,
    radius: F64 | float,
    gemm: GemmPlan,
    dtype: str,
    *,
    bias: F32 | None = None,
    may_elide: bool = False,
) -> tuple[F64, F64]:
    """Every value the layer may return: [lo, hi] after the output roundings and the bias.

    Rounding is monotone, so the image of [centre - radius, centre + radius] under the chain lies
    between the images of its ends: exact, with no u_out term. ``may_elide``: roundings outside the
    kernel may be omitted (torch.compile by default keeps fused chains in fp32); the result is then
    the hull of both outcomes.
    """
    with np.errstate(all="ignore"):
        ends = np.stack([centre - radius, centre + radius])
        lo, hi = _finish(ends, gemm.rounding, dtype, bias)
        roundings = gemm.rounding[:1] if gemm.kernel_rounds else ()
        if may_elide and roundings != gemm.rounding:
            lo_kept, hi_kept = _finish(ends, roundings, dtype, bias)
            lo, hi = np.minimum(lo, lo_kept), np.maximum(hi, hi_kept)
    return lo, hi


def fused_bias_radius(centre: F64, radius: F64, bias: F32, contracted: int) -> F64:
    """``radius``, enlarged for a kernel that adds the bias among the partial sums, not after them.

    Proof. The bias is one more term of the sum: gamma_K (S + |bias|) with S = |A||B|^T. For K >= 2
    gamma_K S <= 3 gamma_{K-1} S <= 3 radius; for K = 1, S = |centre|.
    """
    with np.errstate(all="ignore"):
        slack = 2.0 * U32 * np.abs(centre) + gamma(contracted + 1) * np.abs(bias)[None, :]
        return np.asarray(3.0 * radius + slack)


def unrounded(gemm: GemmPlan) -> GemmPlan:
    """The same GEMM with a fused epilogue: nothing is rounded before the bias is added."""
    return replace(gemm, rounding=(), kernel_rounds=True)


def _finish(ends: F64, rounding: tuple[Rounding, ...], dtype: str, bias: F32 | None) -> F64:
    out = FORMATS[dtype]
    for step, before in zip(rounding, ("", *rounding), strict=False):
        if (before, step, dtype) == ("bf16", "out", "bf16") and _all_normal(ends, out):
            continue  # the values are bf16 already
        ends = round_to(ends, _BF16_WIDE if step == "bf16" else out, overflow="ieee")
    if bias is not None:
        # the addition itself is done in fp32 whatever the output dtype, so it rounds to fp32 first
        ends = round_to(ends + bias.astype(np.float64), FORMATS["fp32"], overflow="ieee")
    elif rounding and rounding[-1] == "out":
        return ends
    return round_to(ends, out, overflow="ieee")


def _all_normal(values: F64, fmt: Format) -> bool:
    magnitude = np.abs(values)
    return bool((((magnitude >= fmt.min_normal) & (magnitude <= fmt.max)) | (magnitude == 0)).all())


def contains(lo: F64, hi: F64, got: NDArray[Any]) -> NDArray[np.bool_]:
    """Elementwise lo <= got <= hi; False where any of the three is NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray((got >= lo) & (got <= hi))


def excludes_zero(lo: F64, hi: F64) -> NDArray[np.bool_]:
    """Elementwise: True where the sign is known; False where an end is NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray((lo > 0) | (hi < 0))
