"""A bias gradient is the sum of the output gradients, whatever else is quantised."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("O16",)


def test_bias_gradient(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_bias_gradient_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung, needs=lambda spec: spec.bias)
