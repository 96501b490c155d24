"""Attention kernels: a bound for the log-sum-exp that a forward saves for its backward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Accumulator, sum_radius
from narrowfuzz.numerics.bounds import FLUSH32
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.operators.attention_products import products
from narrowfuzz.play.attention_scores import sums_to_one, with_mask
from narrowfuzz.trace.trace import AttentionCall

#: Bound for a row of probabilities whose scores all equal a large mask value: one fp32 number
#: cannot hold the logarithm of the sum beside that value. Where it is lost, the sum of the row is
#: off by the number of keys.
OFF_BESIDE_A_MASK = 0.5


class Excess(NamedTuple):
    """How far the worst row of probabilities is from a sum of 1; 0 where no row can be judged."""

    #: The distance in units of its bound, and that bound.
    factor: float
    allowed: float
    #: True: the scores of the row equal a large mask value, and its log-sum-exp is right except for
    #: fp32's rounding, in which the logarithm of the sum is lost.
    swallowed: bool


def softmax_excess(call: AttentionCall, adds: Accumulator) -> Excess:
    """max over rows of |sum exp(qk - lse) - 1| in units of its bound.

    Bound. A score q.k of d products errs by the error of the accumulator (``sum_radius``, with one
    rounding of the result) and by what bound 3.2 lets a kernel flush, and where a mask is added by
    one more rounding of the score and of the sum; the saved log-sum-exp errs by one fp32 rounding
    and by the errors of the kernel's exponential and sum, at most 2^-12 together for up to 4096
    terms. With delta twice the sum of these errors (two passes), each probability changes by a
    factor within e^(+-delta), so their sum changes by at most e^delta - 1. A probability that is
    below e^-200 even with these errors counts as none: the sum of 4096 such probabilities is
    negligible beside 2^-12, however far off its score is. Rows whose delta exceeds 1/2 are not
    judged, except those whose scores equal a large mask value: these scores are known exactly.
    """
    with np.errstate(all="ignore"):
        of = products(call.q, call.k)
        least = (FORMATS[call.dtype].min_normal,) * 2
        allowed = sum_radius(of.q, of.k, adds, 1, least, of.size)
        reach = (allowed + FLUSH32 * (2 * call.q.shape[-1] + of.sums)) * call.scale
        summed = of.raw * call.scale
        lse = call.lse.astype(np.float64).reshape(summed.shape[:-1])
        if call.added is not None:
            masked = with_mask(summed, call.added)
            reach += U32 * (np.abs(summed) + np.abs(masked))
            summed = masked
        below = summed - lse[..., None]
        reach[(summed == -np.inf) | (below + 2.0 * reach < -200.0)] = 0.0
        total = np.exp(below).sum(axis=-1)
        delta = 2.0 * (reach.max(axis=-1) + U32 * np.abs(lse) + 2.0**-12)
        sure = delta < 0.5
        judged = sums_to_one(summed, lse, call.added) & (sure | (np.abs(lse) >= 2.0**20))
        if not judged.any():
            return Excess(0.0, 0.0, False)
        bound = np.where(sure, np.expm1(delta), OFF_BESIDE_A_MASK)
        ratio = np.where(judged, np.abs(total - 1.0) / bound, 0.0)
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    largest = summed[at].max()
    with np.errstate(invalid="ignore"):  # where all scores are infinite
        exact = largest + np.log(np.exp(summed[at] - largest).sum())
    beside = not sure[at] and bool(abs(lse[at] - exact) <= 2.0 * U32 * abs(lse[at]))
    return Excess(float(ratio[at]), float(bound[at]), beside)
