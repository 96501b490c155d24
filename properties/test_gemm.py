"""Every result lies in the interval that its operands allow."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = (
    "O5",
    "O15",
)


def test_gemm(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_gemm_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung)
