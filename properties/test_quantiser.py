"""Amax, scale and codes are what the recipe's rules say, bit for bit."""

from __future__ import annotations

import pytest

from harness.case import Compile
from harness.plugin import Harness
from harness.strategies import cases

RULES = (
    "O4",
    "O3",
    "O2",
)


@pytest.mark.parametrize("compile", ["none", "aot_eager", "inductor"])
def test_quantiser(harness: Harness, compile: Compile) -> None:
    harness.check(cases(harness.recipes, compile=compile), RULES, compile=compile)
