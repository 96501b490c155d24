"""Batched and flattened inputs give the same bits."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R17",)


def test_shapes(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
