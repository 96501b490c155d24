"""Recomputation changes nothing: outputs, gradients, codes, scales, attention's statistics."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = (
    "O12",
    "O13",
    "O18",
)


def test_checkpoint(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_checkpoint_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(("O13", "O18"), rung, needs=lambda spec: spec.checkpoint != "none")
