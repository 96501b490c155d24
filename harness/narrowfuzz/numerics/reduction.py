"""Possible results of a sum over ranks: every rank rounds its own term, and the order is open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowfuzz.numerics.formats import F64, Format, round_to


def sum_interval(
    ends: Sequence[tuple[F64, F64]], fmt: Format, more: F64 | float = 0.0
) -> tuple[F64, F64]:
    """The interval of the sum of one number of each interval in ``ends``, added in ``fmt`` in any
    order. ``more`` is one more term, which any rank may add at any place in that order.

    Proof. The terms of the ranks lie in ``ends``, and are already rounded. A sum of n terms in any
    order has n - 1 additions, each of which errs by at most u times a partial sum, and partial sums
    are at most S, the sum of magnitudes, times (1 + u)^(n - 2): (n - 1) u (1 + u)^n S covers all of
    them. The last addition rounds the exact sum of two terms, so for n = 2 it is exact to round
    both ends; the same holds where additions are made in fp32 and rounded to ``fmt`` once. Partial
    sums also lie between the sum of the negative terms and that of the positive ones: where one of
    these leaves the range of ``fmt``, some order may overflow on the way, and the interval is -inf
    to inf.
    """
    with np.errstate(all="ignore"):
        lo = np.sum([lo for lo, _ in ends], axis=0) + more
        hi = np.sum([hi for _, hi in ends], axis=0) + more
        terms = len(ends) + bool(np.any(more))
        if terms > 2:
            size = np.sum([np.maximum(np.abs(lo), np.abs(hi)) for lo, hi in ends], axis=0)
            u = fmt.unit_roundoff
            slack = (terms - 1) * u * (1.0 + u) ** terms * (size + np.abs(more))
            slack = slack + (terms - 1) * fmt.min_subnormal
            least = np.sum([np.minimum(lo, 0.0) for lo, _ in ends], axis=0) + np.minimum(more, 0.0)
            most = np.sum([np.maximum(hi, 0.0) for _, hi in ends], axis=0) + np.maximum(more, 0.0)
            over = np.maximum(-least, most) + slack > fmt.max
            lo, hi = np.where(over, -np.inf, lo - slack), np.where(over, np.inf, hi + slack)
        low, high = round_to(np.stack([lo, hi]), fmt, overflow="ieee")
    return low, high
