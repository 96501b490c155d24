"""Compiled code is eager code: to the bit where it must be, else no worse against float64."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness

RULES = (
    "O8",
    "O9",
)


@pytest.mark.parametrize("rung", COMPILED)
def test_compile(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung)
