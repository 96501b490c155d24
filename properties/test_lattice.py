"""Where every sum is exact, every arm returns the one exact result."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("O7",)


def test_lattice(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_lattice_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung, needs=lambda spec: spec.k > 0)
