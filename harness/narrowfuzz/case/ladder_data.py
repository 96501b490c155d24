"""Ladder data: operands whose GEMM counts its accumulator's fraction bits and promotions.

Element (i, j) of the result is P + n s, or n s alone, of one large product P = 2^12, n small ones
s = m 2^-k P, and often -P as well. Row i of A says where they stand: the small ones in P's own
step, in another step of its run, or anywhere; row j of B says how small they are. So every element
is a rung of its own: what lies in P's step survives down to the last fraction bit and is cut below
it, what lies in another run survives only where sums are promoted or K is split, and what is left
beside -P is seen in a narrow result, too.

Every step begins with a column that holds A's largest number and one that holds B's, where the
other operand is zero: every granule has its maximum, so every scale is the same power of two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.formats import F64

#: Products that a tensor core adds at once. Where a step is another, elements are rungs of another
#: height: what they must come to is worked out from the operands.
STEP = 32
#: Steps between two promotions.
_RUN = 4
#: Columns of a step that are no rungs: both operands' maxima.
_PINNED = 2
#: The large product is the square of this.
_LARGE = 6
#: Small products of an element at most.
_MOST = 6


class _Choices:
    """Small numbers out of the bits of one hash."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __call__(self, among: int) -> int:
        self.bits, choice = divmod(self.bits, among)
        return choice


def placed(h: NDArray[np.uint64], contracted: int, largest: float) -> F64:
    """Operand A, [rows, contracted], from a hash a row: where the products of a row stand."""
    x = np.zeros((len(h), contracted))
    x[:, ::STEP] = largest
    steps = max(0, (contracted - _PINNED - 2) // STEP + 1)
    for row, bits in zip(x, h, strict=True):
        if steps:
            _place(row, _Choices(int(bits)), steps)
    return x


def sized(h: NDArray[np.uint64], contracted: int, largest: float) -> F64:
    """Operand B, [rows, contracted], from a hash a row: how small a row's small products are."""
    column = np.arange(contracted) % STEP
    height = 4 + (h % np.uint64(9)).astype(np.int64)
    mantissa = np.where((h >> np.uint64(8)) % np.uint64(4) == 0, 1.5, 1.0)
    small = np.ldexp(mantissa, _LARGE - height)[:, None]
    x = np.where(column % 2 == 0, 2.0**_LARGE, small)
    x = np.where(column == 1, largest, x)
    return np.where(column == 0, 0.0, x)


def _place(row: F64, choose: _Choices, steps: int) -> None:
    """P, the small products and mostly -P; even columns make large products, odd ones small."""
    home = choose(steps)
    sign = 1.0 - 2.0 * choose(2)
    large = _even(row, home, choose)
    there = _other(home, steps, choose)
    start, pairs = choose(16), _pairs(row, there)
    small = (1.0 - 2.0 * choose(2)) * 2.0 ** (_LARGE - choose(9))
    for n in range(min(1 + choose(_MOST), pairs)):
        row[there * STEP + _PINNED + 1 + 2 * ((start + n) % pairs)] = small
    row[large] = sign * 2.0**_LARGE
    away = choose(4)  # no -P, one in P's step, or one anywhere
    opposite = _even(row, home if away == 1 else choose(steps), choose)
    if away and opposite != large:
        row[opposite] = -row[large]


def _other(home: int, steps: int, choose: _Choices) -> int:
    """The step of the small products: P's own, one of its run, or any."""
    first = home - home % _RUN
    of_run = first + choose(min(_RUN, steps - first))
    return (home, of_run, choose(steps))[choose(3)]


def _pairs(row: F64, step: int) -> int:
    """Columns of either kind that a step has, the last one maybe fewer."""
    return (min(STEP, len(row) - step * STEP) - _PINNED) // 2


def _even(row: F64, step: int, choose: _Choices) -> int:
    return step * STEP + _PINNED + 2 * (choose(16) % _pairs(row, step))
