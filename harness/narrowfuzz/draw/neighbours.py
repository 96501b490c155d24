"""Hypothesis strategies for neighbours of a case: its Spec with one or two fields of another draw
of the same recipe and model, and other data."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case.layout import fitting
from narrowfuzz.case.spec import Case, Spec, fields_of
from narrowfuzz.draw.choices import between, sampled
from narrowfuzz.draw.operator_specs import operator_specs
from narrowfuzz.draw.sharded_specs import sharded_specs
from narrowfuzz.draw.specs import fixed, specs
from narrowfuzz.draw.strategies import batches
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import Recipe

#: Fields that a neighbour has in common with the case.
_STAY = frozenset({"recipe", "backend", "model", "compile", "kernels"})
_FIELDS = tuple(field.name for field in fields_of(Spec) if field.name not in _STAY)


@st.composite
def neighbours(draw: st.DrawFn, spec: Spec, recipe: Recipe) -> Spec:
    """The Spec with one or two fields changed; unchanged if the recipe supports no such Spec."""
    other = draw(_others(spec, recipe))
    differing = [name for name in _FIELDS if getattr(other, name) != getattr(spec, name)]
    for _ in range(draw(between(1, 2)) if differing else 0):
        name = draw(sampled(*differing))
        near = msgspec.structs.replace(spec, **{name: getattr(other, name)})
        spec = _playable(near, recipe) or spec
    return spec


def _others(spec: Spec, recipe: Recipe) -> st.SearchStrategy[Spec]:
    """The strategy by which campaigns draw Specs of this model on the same rung."""
    if spec.sharded:
        return sharded_specs([recipe], (spec.model,))
    if MODELS[spec.model].kind == "operator":
        return operator_specs([recipe], (spec.model,), compile=spec.compile)
    linear = spec.model == "linear"
    return specs([recipe], compile=spec.compile, models=(spec.model,), linears=linear)


def _playable(spec: Spec, recipe: Recipe) -> Spec | None:
    """The Spec with sizes that fit its model and ranks; None if the recipe does not support it."""
    try:
        spec = fitting(fixed(spec, recipe))
        recipe.check(spec)
    except ValueError:
        return None
    return spec


def near(case: Case, recipe: Recipe, *, draws: int) -> st.SearchStrategy[tuple[Case, ...]]:
    """Cases of one neighbour of the case, with ``draws`` different data."""
    return batches(neighbours(case.spec, recipe), draws=draws)
