"""Operators alone: what is drawn of them, where campaigns draw them, and that what is planted in
one is found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from draws import drawn_apart
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.campaign.slices import AGAIN, FIRST
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.cli import main
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.operator_specs import operator_specs
from narrowfuzz.draw.specs import specs
from narrowfuzz.draw.strategies import OF_OPERATORS, WILD, batches
from narrowfuzz.models.catalog import COMPOSED, MODELS, of_kind
from narrowfuzz.models.operators import MANY, OPERATORS, models_of_operators
from narrowfuzz.operators import BY_NAME
from narrowfuzz.recipe.recipe import UNCONVERTED, unconverted
from samples import recipes

RECIPES = recipes()
PLAIN = [RECIPES[name] for name in UNCONVERTED]
SINGLE_OPERATORS = of_kind("operator")


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    """Of each as a campaign draws it: many of those that attend, of others a few."""
    some = (
        drawn_apart(batches(operator_specs(PLAIN, (name,))), 18 if MODELS[name].attends else 3, i)
        for i, name in enumerate(SINGLE_OPERATORS)
    )
    return [case for found in some for batch in found for case in batch]


def test_a_model_of_an_operator_names_operators_that_are_judged() -> None:
    assert all(model.operators <= set(BY_NAME) for model in OPERATORS)  # type: ignore[operator]


def test_every_one_is_drawn_with_lengths_on_both_sides_of_blocks(drawn: list[Case]) -> None:
    specs = {case.spec for case in drawn}
    assert {spec.model for spec in specs} == set(SINGLE_OPERATORS)
    attends = [spec for spec in specs if MODELS[spec.model].attends]
    assert min(s.m for s in attends) == 1 and max(s.m for s in attends) > 512
    assert any(s.n < 16 for s in attends) and any(s.n > 512 for s in attends)
    assert any(s.k // s.heads > 128 for s in attends)
    plain = [spec for spec in attends if spec.input_layout == "contiguous"]
    assert len(plain) > len(attends) / 2  # any other runs without the fused kernel


def test_no_operand_and_no_score_is_too_many(drawn: list[Case]) -> None:
    for spec in {case.spec for case in drawn}:
        assert spec.tokens * spec.k <= 2**16 * 4 and spec.n * spec.k <= 2**16 * 4
        if MODELS[spec.model].attends:
            assert spec.tokens * spec.n * spec.heads <= 2**15 or spec.n == 1


def test_values_of_their_own_are_drawn_of_them_alone(drawn: list[Case]) -> None:
    assert set(OF_OPERATORS) <= {case.data.values for case in drawn}
    # the simplest examples are none of these
    own = [c for c in drawn if MODELS[c.spec.model].values and c.data != DataSpec()]
    sensitive = [case.data.values in MODELS[case.spec.model].values for case in own]
    assert 0.45 < sum(sensitive) / len(own) < 0.8
    every = {values for name in SINGLE_OPERATORS for values in MODELS[name].values}
    assert every <= set(OF_OPERATORS)
    others = [case for batch in examples(batches(specs(PLAIN)), 50, 0) for case in batch]
    assert {case.data.values for case in others} <= set(WILD)


def test_recipes_that_convert_linears_do_not_take_them() -> None:
    assert {name for name, recipe in RECIPES.items() if unconverted(recipe)} == set(UNCONVERTED)
    for recipe in RECIPES.values():
        assert recipe.takes("sdpa") is unconverted(recipe)
        assert recipe.takes("linear") is not bool(recipe.models_of)


@pytest.mark.parametrize(
    ("models", "recipes", "wanted"),
    [
        ((), PLAIN, True),
        (("sdpa",), PLAIN, True),
        (("linear", "mlp_gelu"), PLAIN, False),
        ((), [RECIPES["torchao.float8.tensorwise"]], False),
    ],
)
def test_campaigns_draw_them_where_there_is_a_recipe_that_converts_nothing(
    models: tuple[str, ...], recipes: Any, wanted: bool, tmp_path: Any
) -> None:
    config = Config(out=tmp_path, models=models, linears=not models or "linear" in models)
    made = Generator(config, recipes, (), random.Random(0), lambda spec: recipes[0].plan(spec))
    for order in (FIRST, AGAIN):
        slices = made.slices(order, ("none", "inductor"))
        assert ("operators" in {one.models for one in slices}) is wanted
        if models == ("sdpa",):
            assert {one.models for one in slices} == {"operators"}


def test_what_other_slices_draw_does_not_hang_on_them(tmp_path: Any) -> None:
    def specs_of(before: bool) -> list[Spec]:
        made = Generator(
            Config(out=tmp_path, cases=100), PLAIN, (), random.Random(0), PLAIN[0].plan
        )
        found: list[Spec] = []
        if before:
            made.operators_alone("none", lambda: True, lambda batch: None)
        made.converted_models(
            "none", "models", lambda: True, lambda batch: found.append(batch[0].spec)
        )
        return found

    assert specs_of(before=True) == specs_of(before=False)
    assert {spec.model for spec in specs_of(before=True)} <= set(COMPOSED)


def test_a_compiled_run_begins_with_many_operators_in_the_widest_format(tmp_path: Any) -> None:
    made = Generator(Config(out=tmp_path), PLAIN, (), random.Random(0), PLAIN[0].plan)
    first = made.operator_decks["inductor"].take(3)
    assert [(recipe.name, model) for recipe, model in first] == [
        ("torch.fp32", MANY),
        ("torch.fp16", MANY),
        ("torch.bf16", MANY),
    ]


def test_globs_name_operators() -> None:
    assert models_of_operators(["layer_norm*"]) == ("layer_norm", "layer_norm_mixed")
    assert set(models_of_operators(["attention"])) == {
        m for m in SINGLE_OPERATORS if m.startswith("sdpa")
    }
    with pytest.raises(ValueError, match=r"no operator 'attnetion' is run alone; these are: .*sum"):
        models_of_operators(["attnetion"])


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["run", "--cases", "1", *options])
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no operator 'sdpa'" in refused(capsys, "--operator", "sdpa")
    said = refused(capsys, "--operator", "sum", "--recipe", "torchao.float8.rowwise")
    assert "leave --recipe out, or name torch.fp32 or torch.bf16 or torch.fp16" in said
    said = refused(capsys, "--operator", "te_router")
    assert "only te.experts runs such a model; add --recipe te.experts" in said
    said = refused(capsys, "--model", "te_experts_softmax")
    assert "te_experts_softmax: only te.experts runs such a model" in said
