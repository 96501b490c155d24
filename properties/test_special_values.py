"""Inf and NaN come out where the plan says so, and nowhere else."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = (
    "O10",
    "O11",
)


def test_special_values(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_special_values_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung)
