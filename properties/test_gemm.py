"""Every result lies in the interval that its operands allow."""

from __future__ import annotations

import pytest

from harness.case import Compile
from harness.plugin import Harness
from harness.strategies import cases

RULES = (
    "O5",
    "O15",
)


@pytest.mark.parametrize("compile", ["none", "aot_eager", "inductor"])
def test_gemm(harness: Harness, compile: Compile) -> None:
    harness.check(cases(harness.recipes, compile=compile), RULES, compile=compile)
