"""A parameter's gradient is the sum of what the calls of its layer computed."""

from __future__ import annotations

import msgspec
from narrowfuzz.case import Case
from narrowfuzz.plugin import Harness
from narrowfuzz.strategies import cases

RULES = ("O21",)


def called_twice(case: Case) -> Case:
    """Most cases call a layer once, and then there is no sum."""
    spec = case.spec
    if spec.microbatches > 1 or not spec.trains:
        return case
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(spec, microbatches=2))


def test_gradient_sum(harness: Harness) -> None:
    harness.check(cases(harness.recipes).map(called_twice), RULES)
