"""A layer with a bias is the layer without it, plus the bias."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R19",)


def test_bias(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
