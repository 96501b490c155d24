"""A parameter's gradient is the sum of what the calls of its layer computed."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("O21",)


def test_gradient_sum(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)
