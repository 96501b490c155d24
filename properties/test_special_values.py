"""Inf and NaN come out where the plan says so, and nowhere else."""

from __future__ import annotations

import pytest

from harness.case import Compile
from harness.plugin import Harness
from harness.strategies import cases

RULES = (
    "O10",
    "O11",
)


@pytest.mark.parametrize("compile", ["none", "aot_eager", "inductor"])
def test_special_values(harness: Harness, compile: Compile) -> None:
    harness.check(cases(harness.recipes, compile=compile), RULES, compile=compile)
