"""Right stochastic rounding follows no rule; each rule is named, also by what scripts contain."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from narrowfuzz.numerics.chance import one_way
from narrowfuzz.numerics.formats import E2M1, F32, F64, decode, encode, neighbours
from narrowfuzz.play.check_layers import by_chance

#: (chance of the farther neighbour, what is cast, random number) -> is it rounded there?
Rule = Callable[[F64, F32, F64], np.ndarray]


def rounded(x: F32, rule: Rule, seed: int = 0) -> F64:
    """What a cast makes of x by a rule, with 8 random bits for each element."""
    low, high = neighbours(x, E2M1)
    near, far = np.where(x > 0, low, high), np.where(x > 0, high, low)
    part = np.where(near == far, 0.0, (x - near) / np.where(near == far, 1.0, far - near))
    drawn = np.random.default_rng(seed).integers(256, size=x.shape) / 256
    return np.where(rule(part, x, drawn), far, near)


def by_draw(part: F64, x: F32, drawn: F64) -> np.ndarray:
    return part + drawn >= 1


def told_by_scripts(x: F32, got: F64) -> int:
    codes = torch.from_numpy(encode(got, E2M1)).long()
    return by_chance(codes, torch.from_numpy(x))


def numbers(seed: int, size: int = 1024) -> F32:
    rng = np.random.default_rng(seed)
    x = np.float32(rng.normal(size=size) * 3)
    x[::9] = rng.choice(decode(np.arange(16, dtype=np.uint8), E2M1), size=x[::9].shape)
    return x


@pytest.mark.parametrize(
    ("way", "rule"),
    [
        ("toward zero", lambda part, x, drawn: part > 1),
        ("away from zero", lambda part, x, drawn: part > 0),
        ("by one random number", lambda part, x, drawn: part + 255 / 256 >= 1),
        ("up", lambda part, x, drawn: x > 0),
        ("down", lambda part, x, drawn: x < 0),
        ("to nearest", lambda part, x, drawn: part > 0.5),
        ("by one random number", lambda part, x, drawn: part + drawn[0] >= 1),
        (None, by_draw),
    ],
)
def test_each_rule_is_named(way: str | None, rule: Rule) -> None:
    for seed in range(4):
        x = numbers(seed)
        got = rounded(x, rule, seed=seed + 100)
        assert one_way(x, got, E2M1) == way
        assert bool(told_by_scripts(x, got)) == (way is not None)


def test_few_elements_tell_nothing() -> None:
    for size in (0, 1, 16, 64):
        x = numbers(5, size)
        for to in (0, 1):
            got = rounded(x, lambda part, x, drawn, to=to: part > 1 - to)
            assert one_way(x, got, E2M1) is None and not told_by_scripts(x, got)


def test_elements_hardly_ever_rounded_away_may_all_go_toward_zero() -> None:
    x = np.float32(np.random.default_rng(0).uniform(4, 4.003, size=4096))
    assert one_way(x, np.full(4096, 4.0), E2M1) is None
    assert one_way(x, np.full(4096, 6.0), E2M1) == "away from zero"


def test_scripts_see_a_code_that_is_neither() -> None:
    x = np.float32([0.0, -0.1, 5.0, 7.0, 6.0, math.inf])
    right = rounded(x, by_draw)
    assert told_by_scripts(x, right) == 0
    for i, other in enumerate((0.5, 0.5, 3.0, 4.0, 4.0, 4.0)):
        got = right.copy()
        got[i] = other
        assert told_by_scripts(x, got) == 1
