"""Amax, scale and codes are what the recipe's rules say, bit for bit."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = (
    "O4",
    "O3",
    "O2",
)
#: They quantise nothing.
BASELINES = ("torch.fp32", "torch.bf16")


def test_quantiser(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_quantiser_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung, needs=lambda spec: spec.recipe not in BASELINES)
