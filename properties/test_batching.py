"""A batch padded, or in two parts, gives the same rows, and gradients that add up."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R9", "R10")


def test_batching(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
