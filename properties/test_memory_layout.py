"""Strided, transposed and expanded tensors give what their contiguous copies give."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R16",)


def test_memory_layout(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
