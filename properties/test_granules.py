"""A granule's codes depend on its own data alone, monotonically."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = (
    "R12",
    "R13",
    "R14",
    "R15",
)


def test_granules(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
