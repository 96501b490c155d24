"""Powers of two and signs pass through a quantised layer exactly."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = (
    "R1",
    "R2",
    "R3",
    "R4",
)


def test_scaling(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
