"""The same layer on the same data gives the same bits, tapped or not."""

from __future__ import annotations

import pytest

from harness.case import Compile
from harness.plugin import Harness
from harness.strategies import cases

RULES = ("O1",)


@pytest.mark.parametrize("compile", ["none", "aot_eager", "inductor"])
def test_determinism(harness: Harness, compile: Compile) -> None:
    harness.check(cases(harness.recipes, compile=compile), RULES, compile=compile)
