"""Power-of-two recipes, and both copies of a tensor, agree inside the normal range."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R21", "R22")


def test_recipes_agree(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
