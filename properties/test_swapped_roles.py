"""linear(w, x) is linear(x, w) transposed."""

from __future__ import annotations

from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import direct_cases

RULES = ("R11",)


def test_swapped_roles(harness: Harness) -> None:
    harness.check(direct_cases(harness.recipes), RULES)
