"""What conversion accepts runs forward and backward, or is refused clearly; no more changes."""

from __future__ import annotations

import pytest
from narrowfuzz.case import COMPILED, Compile
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("contract", "census")


def test_contract(harness: Harness) -> None:
    harness.check(cases(harness.recipes), RULES)


@pytest.mark.parametrize("rung", COMPILED)
def test_contract_compiled(harness: Harness, rung: Compile) -> None:
    harness.check_compiled(RULES, rung)
