"""What conversion accepts runs forward and backward, or is refused clearly; no more changes."""

from __future__ import annotations

import pytest

from harness.case import Compile
from harness.plugin import Harness
from harness.strategies import cases

RULES = ("contract", "census")


@pytest.mark.parametrize("compile", ["none", "aot_eager", "inductor"])
def test_contract(harness: Harness, compile: Compile) -> None:
    harness.check(cases(harness.recipes, compile=compile), RULES, compile=compile)
