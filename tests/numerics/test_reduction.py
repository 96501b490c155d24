"""What adding over ranks may give: every order that a group may choose lies inside."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from narrowfuzz.numerics.formats import FORMATS, round_to
from narrowfuzz.numerics.reduction import sum_interval

RNG = np.random.default_rng(5)


def in_order(terms: tuple[np.ndarray, ...], fmt: str) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = round_to(total + term, FORMATS[fmt], overflow="ieee")
    return total


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_order_lies_inside(fmt: str, ranks: int) -> None:
    values = RNG.standard_normal((ranks, 400)) * 2.0 ** RNG.integers(-20, 20, (ranks, 400))
    terms = [round_to(x, FORMATS[fmt], overflow="ieee") for x in values]
    lo, hi = sum_interval([(x, x) for x in terms], FORMATS[fmt])
    for order in itertools.permutations(terms):
        got = in_order(order, fmt)
        assert ((lo <= got) & (got <= hi)).all()


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_order_may_leave_the_range_on_its_way(fmt: str, ranks: int) -> None:
    """Then nothing is known; but where none does, there are finite ends."""
    values = RNG.uniform(-1.0, 1.0, (ranks, 400)) * FORMATS[fmt].max
    terms = [round_to(x, FORMATS[fmt], overflow="ieee") for x in values]
    lo, hi = sum_interval([(x, x) for x in terms], FORMATS[fmt])
    with np.errstate(invalid="ignore", over="ignore"):
        every = np.stack([in_order(order, fmt) for order in itertools.permutations(terms)])
        known = np.isfinite(lo) & np.isfinite(hi)
        assert ((lo <= every) & (every <= hi) | ~known).all()
    assert known[np.isfinite(every).all(axis=0)].mean() > 0.8
    assert ranks == 2 or not known.all()


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_two_ranks_have_one_result(fmt: str) -> None:
    terms = [round_to(RNG.standard_normal(100), FORMATS[fmt], overflow="ieee") for _ in range(2)]
    lo, hi = sum_interval([(x, x) for x in terms], FORMATS[fmt])
    assert (lo == hi).all()


def test_a_term_that_is_lost_lies_outside() -> None:
    terms = [round_to(1.0 + RNG.random(100), FORMATS["bf16"], overflow="ieee") for _ in range(4)]
    lo, hi = sum_interval([(x, x) for x in terms], FORMATS["bf16"])
    got = in_order(tuple(terms[:3]), "bf16")
    assert ((got < lo) | (got > hi)).all()
