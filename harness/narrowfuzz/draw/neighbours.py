"""Hypothesis strategies for what is near a case: its Spec with one or two fields as another draw of
the same recipe and model has them, and data of its own."""

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

#: What a neighbour has as the case itself has it: what is tested, and where.
_STAY = frozenset({"recipe", "backend", "model", "compile", "kernels"})
_FIELDS = tuple(field.name for field in fields_of(Spec) if field.name not in _STAY)


@st.composite
def neighbours(draw: st.DrawFn, spec: Spec, recipe: Recipe) -> Spec:
    """The Spec with one or two other fields; itself where no such can be played."""
    other = draw(_others(spec, recipe))
    differing = [name for name in _FIELDS if getattr(other, name) != getattr(spec, name)]
    for _ in range(draw(between(1, 2)) if differing else 0):
        name = draw(sampled(*differing))
        near = msgspec.structs.replace(spec, **{name: getattr(other, name)})
        spec = _playable(near, recipe) or spec
    return spec


def _others(spec: Spec, recipe: Recipe) -> st.SearchStrategy[Spec]:
    """What campaigns draw of this model, where it runs."""
    if spec.sharded:
        return sharded_specs([recipe], (spec.model,))
    if MODELS[spec.model].kind == "operator":
        return operator_specs([recipe], (spec.model,), compile=spec.compile)
    linear = spec.model == "linear"
    return specs([recipe], compile=spec.compile, models=(spec.model,), linears=linear)


def _playable(spec: Spec, recipe: Recipe) -> Spec | None:
    """The Spec with sizes that its ranks share; None if the recipe cannot play it."""
    try:
        spec = fitting(fixed(spec, recipe))
        recipe.check(spec)
    except ValueError:
        return None
    return spec


def near(case: Case, recipe: Recipe, *, draws: int) -> st.SearchStrategy[tuple[Case, ...]]:
    """So many draws of the Spec of a neighbour."""
    return batches(neighbours(case.spec, recipe), draws=draws)


def again(case: Case, *, draws: int) -> tuple[Case, ...]:
    """The case itself, and its data with other seeds."""
    return tuple(
        msgspec.structs.replace(
            case, data=msgspec.structs.replace(case.data, seed=(case.data.seed + i) % 2**32)
        )
        for i in range(draws)
    )
