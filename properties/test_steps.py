"""Steps of an optimiser with lr = 0 change nothing."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R18",)


def test_steps(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
