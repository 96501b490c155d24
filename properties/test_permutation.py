"""Tokens, features and K in another order give the same results in that order."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = (
    "R5",
    "R6",
    "R7",
)


def test_permutation(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
