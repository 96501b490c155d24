"""The same layer on the same data gives the same bits, tapped or not."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("O1",)


def test_determinism(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_determinism_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung)
