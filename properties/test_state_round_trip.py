"""A fresh layer that loads the saved state gives the same bits."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R20",)


def test_state_round_trip(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
