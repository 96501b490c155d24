"""Ladder data: operands whose GEMM reveals the accumulator's fraction bits and promotions.

A tensor core adds the products of a step at once; a run is the steps between two promotions.
Element (i, j) of the result is P + n s (one large product P = 2^12 and n small ones
s = m 2^-k P), often with -P added, which leaves n s. Row i of A determines where the products
stand: the small ones in P's own step, in another step of its run, or anywhere. Row j of B
determines how small they are. So every element is a rung by itself: small products in P's step
survive down to the last fraction bit and are cut below it; those in another run survive only where
sums are promoted or K is split; and what is left when -P cancels P shows even in a narrow result.

Every step begins with a column that holds A's largest number and one that holds B's, where the
other operand is zero. So every granule has the same maximum, and every scale is the same power of
two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.formats import F64

#: Number of products that a tensor core adds at once. If the hardware's step has another size, the
#: elements become rungs of other heights, which is harmless: the expected results are computed from
#: the operands.
STEP = 32
#: Number of steps between two promotions.
_RUN = 4
#: Number of columns at the start of a step that hold the operands' maxima, and are no rungs.
_PINNED = 2
#: Exponent of both factors of the large product P.
_LARGE = 6
#: Largest number of small products in an element.
_MOST = 6


class _Choices:
    """Draws numbers below given limits from the bits of one hash."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __call__(self, among: int) -> int:
        self.bits, choice = divmod(self.bits, among)
        return choice


def placed(h: NDArray[np.uint64], contracted: int, largest: float) -> F64:
    """Operand A, [rows, contracted], from one hash per row: determines where the products stand."""
    x = np.zeros((len(h), contracted))
    x[:, ::STEP] = largest
    steps = max(0, (contracted - _PINNED - 2) // STEP + 1)
    for row, bits in zip(x, h, strict=True):
        if steps:
            _place(row, _Choices(int(bits)), steps)
    return x


def sized(h: NDArray[np.uint64], contracted: int, largest: float) -> F64:
    """Operand B, [rows, contracted], from one hash per row: determines how small the small products
    are."""
    column = np.arange(contracted) % STEP
    height = 4 + (h % np.uint64(9)).astype(np.int64)
    mantissa = np.where((h >> np.uint64(8)) % np.uint64(4) == 0, 1.5, 1.0)
    small = np.ldexp(mantissa, _LARGE - height)[:, None]
    x = np.where(column % 2 == 0, 2.0**_LARGE, small)
    x = np.where(column == 1, largest, x)
    return np.where(column == 0, 0.0, x)


def _place(row: F64, choose: _Choices, steps: int) -> None:
    """Place A's factors of P, of the small products and mostly of -P in one row. Even columns make
    large products, odd columns small ones."""
    home = choose(steps)
    sign = 1.0 - 2.0 * choose(2)
    large = _even(row, home, choose)
    there = _other(home, steps, choose)
    start, pairs = choose(16), _pairs(row, there)
    small = (1.0 - 2.0 * choose(2)) * 2.0 ** (_LARGE - choose(9))
    for n in range(min(1 + choose(_MOST), pairs)):
        row[there * STEP + _PINNED + 1 + 2 * ((start + n) % pairs)] = small
    row[large] = sign * 2.0**_LARGE
    away = choose(4)  # 0: no -P; 1: -P in P's step; otherwise -P anywhere
    opposite = _even(row, home if away == 1 else choose(steps), choose)
    if away and opposite != large:
        row[opposite] = -row[large]


def _other(home: int, steps: int, choose: _Choices) -> int:
    """The step of the small products, given that of P (``home``): the same, one of its run, or any
    step."""
    first = home - home % _RUN
    of_run = first + choose(min(_RUN, steps - first))
    return (home, of_run, choose(steps))[choose(3)]


def _pairs(row: F64, step: int) -> int:
    """Number of columns of each kind (even, odd) in a step; the last step may have fewer."""
    return (min(STEP, len(row) - step * STEP) - _PINNED) // 2


def _even(row: F64, step: int, choose: _Choices) -> int:
    return step * STEP + _PINNED + 2 * (choose(16) % _pairs(row, step))
