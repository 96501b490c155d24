"""Every result lies within the proven distance of the unquantised product."""

from __future__ import annotations

import pytest

from harness.case import Compile
from harness.plugin import Harness
from harness.strategies import cases

RULES = ("O6",)


@pytest.mark.parametrize("compile", ["none", "aot_eager", "inductor"])
def test_layer(harness: Harness, compile: Compile) -> None:
    harness.check(cases(harness.recipes, compile=compile), RULES, compile=compile)
