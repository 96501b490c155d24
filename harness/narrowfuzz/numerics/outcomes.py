"""The possible results of an accumulator, bit for bit: one for every choice that a kernel is free
to make.

For an accumulator that is known ``to_the_bit``, the steps are runs of neighbouring products, and so
are the runs between two promotions and the tiles between which K may be split. The kernel chooses
the order of a run's steps, which tiles share a part of a split K, and the order in which the sums
of runs and parts are added.

Proof that no result is missing. A step of zeros changes no sum: the running sum is then the only
term, has no more bits than are kept and so keeps them all. So only steps with a nonzero product
count, and where these are at most ``MOST_STEPS``, every order of them and every way to divide their
tiles into parts is tried: more than any kernel does, because parts that are not runs of tiles are
tried as well. Sums of runs and of parts are known only where they are multiples of one unit and
their magnitudes add up to at most 2^24 units: then fp32 adds them without rounding, in any order.

Any accumulator, known to the bit or not, returns the exact sum where all products are multiples of
a unit, their magnitudes add up to less than 2^(fraction bits + 1) units, and 2 to the power of a
product's exponent stays below that limit, too. The exponent of a product is the sum of its factors'
exponents, which is raised where a factor is subnormal.

Source: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from itertools import product as combinations_of

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import Accumulator
from narrowfuzz.numerics.formats import F64

#: The largest number of steps with nonzero products for which all orders are tried.
MOST_STEPS = 3
#: The exponent of zero: below all others.
_NONE = -1000

Parts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Products:
    """The products of one row of A with all rows of B, [columns, rows of B], and the exponents by
    which a step aligns them: the sums of both factors' exponents."""

    values: F64
    exponents: NDArray[np.int64]

    def top(self) -> NDArray[np.int64]:
        """The largest exponent of a nonzero product, for each row of B."""
        there = np.where(self.values != 0.0, self.exponents, _NONE)
        return np.asarray(there.max(axis=0, initial=_NONE))


def outcomes(
    a: F64, b: F64, accumulator: Accumulator, least: tuple[F64 | float, F64 | float]
) -> F64:
    """Every sum that the accumulator may return for each element, [choices, rows of a, rows of b].
    An element with fewer choices repeats one of them. NaN where the sum is not known to the bit.

    ``least``: the smallest normal number of each row of a and of b; smaller numbers are aligned by
    its exponent.
    """
    if not accumulator.known:
        return np.full((1, len(a), len(b)), np.nan)
    exponents_a, exponents_b = _exponents(a, least[0]), _exponents(b, least[1])
    met = np.any(b != 0.0, axis=0)
    found = []
    for i, row in enumerate(a):
        columns = np.flatnonzero((row != 0.0) & met)
        some = _Products(
            row[columns, None] * b[:, columns].T,
            exponents_a[i, columns, None] + exponents_b[:, columns].T,
        )
        units = _unit(row[columns, None]) * _unit(b[:, columns].T)
        found.append(_of_row(some, units, columns, accumulator))
    most = max((len(choices) for choices in found), default=1)
    padded = [np.concatenate([f, np.repeat(f[:1], most - len(f), axis=0)]) for f in found]
    return np.stack(padded, axis=1) if padded else np.empty((1, 0, len(b)))


def _of_row(some: _Products, units: F64, columns: NDArray[np.intp], how: Accumulator) -> F64:
    """The possible sums of one row of A, [choices, rows of B]."""
    total = some.values.sum(axis=0)
    unit = units.min(axis=0, initial=np.inf)
    exact = np.abs(some.values).sum(axis=0) < how.exact_below * unit
    # subnormal factors align higher than their product: that must not truncate anything either
    exact &= np.ldexp(1.0, some.top()) < how.exact_below * unit
    steps = columns // how.step
    if not how.to_the_bit or len(np.unique(steps)) > MOST_STEPS:
        return np.where(exact, total, np.nan)[None]
    return np.stack([np.where(exact, total, one) for one in _choices(some, steps, how)])


def _choices(some: _Products, steps: NDArray[np.intp], how: Accumulator) -> Iterator[F64]:
    """The sums for each choice that the kernel has; NaN where fp32 may round when it adds the sums
    of runs and parts."""
    there = tuple(int(s) for s in np.unique(steps))
    empty = np.zeros(some.values.shape[1])

    @cache
    def added(order: tuple[int, ...]) -> F64:
        """The sum of these steps, added in this order."""
        if not order:
            return empty
        of_step = steps == order[-1]
        last = _Products(some.values[of_step], some.exponents[of_step])
        return _step(added(order[:-1]), last, how.fraction_bits)

    for parts in _shared_out(there, how):
        for orders in combinations_of(*(permutations(part) for part in parts)):
            yield _sum([added(order) for order in orders], empty)


def _shared_out(steps: tuple[int, ...], how: Accumulator) -> Iterable[Parts]:
    """The ways to divide the steps into chains, each of which is added in the accumulator: by runs
    between promotions, or, without promotions, by parts of K."""
    if how.promotes:
        return (_together(steps, how.promotes // how.step),)
    if not how.splits:
        return ((steps,),)
    tiles = _together(steps, how.splits // how.step)
    return (
        tuple(tuple(s for tile in part for s in tile) for part in parts)
        for parts in _partitions(tiles)
    )


def _together(steps: tuple[int, ...], length: int) -> Parts:
    """The steps, grouped by the run of ``length`` steps in which they lie."""
    runs = dict.fromkeys(s // length for s in steps)
    return tuple(tuple(s for s in steps if s // length == run) for run in runs)


def _partitions(items: Parts) -> Iterator[tuple[Parts, ...]]:
    """Every way to divide the items into parts."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for parts in _partitions(rest):
        yield ((first,), *parts)
        for i, part in enumerate(parts):
            yield (*parts[:i], (first, *part), *parts[i + 1 :])


def _step(total: F64, some: _Products, fraction_bits: int) -> F64:
    """The running sum plus one step of products: aligned to the largest exponent, truncated, added,
    truncated again."""
    top = np.maximum(some.top(), np.where(total != 0.0, np.frexp(total)[1] - 1, _NONE))
    unit = np.ldexp(1.0, top - fraction_bits)
    whole = np.trunc(some.values / unit).sum(axis=0) + np.trunc(total / unit)
    significand, exponent = np.frexp(whole * unit)
    cut = np.trunc(np.ldexp(significand, fraction_bits + 1))
    return np.asarray(np.ldexp(cut, exponent - fraction_bits - 1))


def _sum(terms: Sequence[F64], empty: F64) -> F64:
    """The sum of the terms in fp32 if it is exact in any order; NaN where an addition may round."""
    stacked = np.stack(terms) if terms else empty[None]
    unit = _unit(stacked).min(axis=0)
    exact = np.abs(stacked).sum(axis=0) <= 2.0**24 * unit
    return np.where(exact, stacked.sum(axis=0), np.nan)


def _exponents(x: F64, least: F64 | float) -> NDArray[np.int64]:
    """The exponent of every number, at least that of its row's smallest normal number."""
    lowest = np.reshape(np.asarray(least, dtype=np.float64), (-1, 1))
    return np.asarray(np.frexp(np.maximum(np.abs(x), lowest))[1] - 1, dtype=np.int64)


def _unit(x: F64) -> F64:
    """The largest power of two of which a number is a multiple; Inf for zero."""
    significand, exponent = np.frexp(x)
    whole = np.ldexp(significand, 53).astype(np.int64)
    unit = np.ldexp((whole & -whole).astype(np.float64), exponent - 53)
    return np.where(whole == 0, np.inf, unit)
