"""A finding shows how its model was converted, in the source of the recipe."""

from __future__ import annotations

from narrowfuzz.case.spec import Spec
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.triage.script.recipe_source import conversion_of
from samples import recipes


def source(name: str, backend: str) -> str:
    recipe = recipes()[name]
    assert isinstance(recipe, Recipe)
    return conversion_of(recipe, Spec(recipe=name, backend=backend))


def test_the_call_of_the_library_is_there() -> None:
    assert "quantize_(model, MXFP8TrainingOpConfig(" in source("torchao.mxfp8.rceil", "wrapper")
    text = source("torchao.float8.rowwise", "emulated")
    assert "convert_to_float8_training(model" in text and "from_recipe_name('rowwise')" in text


def test_a_recipe_that_converts_nothing_shows_nothing() -> None:
    assert source("torch.bf16", "native") == ""
