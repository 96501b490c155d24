"""Where every sum is exact, every arm returns the one exact result."""

from __future__ import annotations

import pytest

from harness.case import Compile
from harness.plugin import Harness
from harness.strategies import cases

RULES = ("O7",)


@pytest.mark.parametrize("compile", ["none", "aot_eager", "inductor"])
def test_lattice(harness: Harness, compile: Compile) -> None:
    harness.check(cases(harness.recipes, compile=compile), RULES, compile=compile)
