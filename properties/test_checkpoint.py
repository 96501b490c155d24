"""Recomputation changes nothing: outputs, gradients, codes, scales."""

from __future__ import annotations

from harness.plugin import Harness
from harness.strategies import cases

RULES = (
    "O12",
    "O13",
)


def test_checkpoint(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)
