"""Backward belongs to the forward that was run, random numbers included."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from narrowfuzz.case import Case, Spec
from narrowfuzz.models.zoo import MODELS
from narrowfuzz.plugin import Harness
from narrowfuzz.specs import specs
from narrowfuzz.strategies import data_specs

RULES = ("O22",)
#: Models whose output one linear makes.
LAST = tuple(name for name, model in MODELS.items() if model.last)


def test_own_backward(harness: Harness) -> None:
    plain = [r for r in harness.recipes if not r.plan(Spec(recipe=r.name)).quantised]
    if not plain:
        pytest.skip("every selected recipe quantises forward and backward otherwise")
    drawn = specs(plain, models=LAST, linears=False)
    harness.check(st.builds(_case, drawn, data_specs(lattice=False)), RULES)


def _case(spec: Spec, data: object) -> Case:
    return Case(spec=spec, data=data)  # type: ignore[arg-type]
