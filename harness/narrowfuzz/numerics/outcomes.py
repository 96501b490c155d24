"""What an accumulator may return, to the bit: every value that the kernel's own choices leave open.

Of one that is known ``to_the_bit`` the steps are runs of neighbouring products, and so are the runs
between two promotions and the tiles that K may be split between. Left open are the order of a
run's steps, which tiles share a part of a split K, and the order in which sums of runs and parts
are added.

Proof that nothing is missing. A step of zeros changes no sum: the sum so far is alone then, has
its bits already and keeps them. So only steps with a product other than zero count, and where
these are at most ``MOST_STEPS``, every order of them and every way to share their tiles out among
parts is tried: more than any kernel does, for parts that are no runs of tiles are tried as well.
Sums of runs and of parts are judged only where they are multiples of one unit and their magnitudes
add up to at most 2^24 units: then fp32 adds them without rounding, in any order.

Any accumulator, known to the bit or not, returns the sum itself where all products are multiples of
a unit, their magnitudes add up to less than 2^(fraction bits + 1) units, and so far reaches no
product's exponent: that of its factors, which subnormal ones raise.

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

#: Steps with products other than zero whose orders are all tried.
MOST_STEPS = 3
#: An exponent below all others: that of zero.
_NONE = -1000

Parts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Products:
    """The products of one row of A with all rows of B, [columns, rows of B], and the sum of both
    factors' exponents, where a step aligns."""

    values: F64
    exponents: NDArray[np.int64]

    def top(self) -> NDArray[np.int64]:
        """The largest exponent for each row of B."""
        there = np.where(self.values != 0.0, self.exponents, _NONE)
        return np.asarray(there.max(axis=0, initial=_NONE))


def outcomes(
    a: F64, b: F64, accumulator: Accumulator, least: tuple[F64 | float, F64 | float]
) -> F64:
    """Every sum that may come out for each element, [choices, rows of a, rows of b]: a choice that
    an element does not have repeats another, and where too much is open all are NaN.

    ``least``: each row's smallest normal number; what is below it, the accumulator aligns there.
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
    """The choices of one row of A, [choices, rows of B]."""
    total = some.values.sum(axis=0)
    unit = units.min(axis=0, initial=np.inf)
    exact = np.abs(some.values).sum(axis=0) < how.exact_below * unit
    # nor is anything cut where subnormal factors align higher than their product reaches
    exact &= np.ldexp(1.0, some.top()) < how.exact_below * unit
    steps = columns // how.step
    if not how.to_the_bit or len(np.unique(steps)) > MOST_STEPS:
        return np.where(exact, total, np.nan)[None]
    return np.stack([np.where(exact, total, one) for one in _choices(some, steps, how)])


def _choices(some: _Products, steps: NDArray[np.intp], how: Accumulator) -> Iterator[F64]:
    """One array for each way that is left open; NaN where sums of runs and parts are rounded."""
    there = tuple(int(s) for s in np.unique(steps))
    empty = np.zeros(some.values.shape[1])

    @cache
    def added(order: tuple[int, ...]) -> F64:
        """The sum of these steps, one after the other."""
        if not order:
            return empty
        of_step = steps == order[-1]
        last = _Products(some.values[of_step], some.exponents[of_step])
        return _step(added(order[:-1]), last, how.fraction_bits)

    for parts in _shared_out(there, how):
        for orders in combinations_of(*(permutations(part) for part in parts)):
            yield _sum([added(order) for order in orders], empty)


def _shared_out(steps: tuple[int, ...], how: Accumulator) -> Iterable[Parts]:
    """The ways in which steps form chains: by runs between promotions, else by parts of K."""
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
    """Steps by the run of ``length`` steps that they lie in."""
    runs = dict.fromkeys(s // length for s in steps)
    return tuple(tuple(s for s in steps if s // length == run) for run in runs)


def _partitions(items: Parts) -> Iterator[tuple[Parts, ...]]:
    """Every way to share items out among parts."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for parts in _partitions(rest):
        yield ((first,), *parts)
        for i, part in enumerate(parts):
            yield (*parts[:i], (first, *part), *parts[i + 1 :])


def _step(total: F64, some: _Products, fraction_bits: int) -> F64:
    """The sum so far and a step of products: aligned to the largest exponent, cut, added, cut."""
    top = np.maximum(some.top(), np.where(total != 0.0, np.frexp(total)[1] - 1, _NONE))
    unit = np.ldexp(1.0, top - fraction_bits)
    whole = np.trunc(some.values / unit).sum(axis=0) + np.trunc(total / unit)
    significand, exponent = np.frexp(whole * unit)
    cut = np.trunc(np.ldexp(significand, fraction_bits + 1))
    return np.asarray(np.ldexp(cut, exponent - fraction_bits - 1))


def _sum(terms: Sequence[F64], empty: F64) -> F64:
    """What fp32 adds up to in any order; NaN where it might round."""
    stacked = np.stack(terms) if terms else empty[None]
    unit = _unit(stacked).min(axis=0)
    exact = np.abs(stacked).sum(axis=0) <= 2.0**24 * unit
    return np.where(exact, stacked.sum(axis=0), np.nan)


def _exponents(x: F64, least: F64 | float) -> NDArray[np.int64]:
    """The exponent of every number, that of its row's smallest normal one at least."""
    lowest = np.reshape(np.asarray(least, dtype=np.float64), (-1, 1))
    return np.asarray(np.frexp(np.maximum(np.abs(x), lowest))[1] - 1, dtype=np.int64)


def _unit(x: F64) -> F64:
    """The largest power of two of which a number is a multiple; Inf for zero."""
    significand, exponent = np.frexp(x)
    whole = np.ldexp(significand, 53).astype(np.int64)
    unit = np.ldexp((whole & -whole).astype(np.float64), exponent - 53)
    return np.where(whole == 0, np.inf, unit)
