"""Appended zeros change nothing."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R8",)


def test_padding(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
