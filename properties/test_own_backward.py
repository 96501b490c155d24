"""Backward belongs to the forward that was run, random numbers included."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.models.zoo import MODELS
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("O22",)


def test_own_backward(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_own_backward_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung, needs=lambda spec: bool(MODELS[spec.model].last))
