"""Every result lies within the proven distance of the unquantised product."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("O6",)


def test_layer(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_layer_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung)
