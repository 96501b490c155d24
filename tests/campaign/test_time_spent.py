"""Seconds are dealt, not cases: what is dear here starves nobody."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.campaign.time_spent import TimeSpent
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.recipe.recipe import load_recipes

RECIPES = load_recipes()
CHEAP, DEAR = "torch.fp32", "torch.bf16"


class Clock:
    """Goes on by what each case costs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def spent(dear: float, *, cases: int = 0) -> dict[str, float]:
    """Seconds that both recipes had in slices of linears, where one's cases cost so much more."""
    clock, seconds = Clock(), {CHEAP: 0.0, DEAR: 0.0}

    def serve(batch: tuple[Case, ...]) -> None:
        recipe = batch[0].spec.recipe
        cost = 0.3 * (dear if recipe == DEAR else 1.0)
        clock.now += cost
        seconds[recipe] += cost

    recipes = [RECIPES[CHEAP], RECIPES[DEAR]]
    generator = Generator(
        Config(out=Path(), cases=cases), recipes, [], random.Random(1),
        lambda spec: RECIPES[spec.recipe].plan(spec), clock,
    )  # fmt: skip
    for _ in range(5):
        generator.converted_models("none", "linears", lambda: True, serve)
    return seconds


@pytest.mark.heavy
def test_a_recipe_that_is_twenty_times_dearer_gets_seconds_not_cases() -> None:
    shared = spent(20.0)
    assert shared[DEAR] < 3 * shared[CHEAP] + 4
    dealt = spent(20.0, cases=100)  # nothing but the seed steers what is counted
    assert dealt[DEAR] > 10 * dealt[CHEAP]


@pytest.mark.heavy
def test_where_all_cost_the_same_all_have_their_turns() -> None:
    shared = spent(1.0)
    assert min(shared.values()) > 0.5 * max(shared.values()) > 5.0


def test_eager_seconds_count_by_recipe_and_by_model() -> None:
    clock = Clock()
    spent = TimeSpent(clock, limits=True)

    def spend(seconds: float, **spec: Any) -> None:
        with spent.on_eager(Spec(**{"recipe": CHEAP, **spec})):
            clock.now += seconds

    spend(30.0)
    assert not spent.eager_overspent(Spec(recipe=CHEAP))  # there is nobody else yet
    spend(1.0, recipe=DEAR)
    assert spent.eager_overspent(Spec(recipe=CHEAP))
    assert not spent.eager_overspent(Spec(recipe=DEAR))
    # models are another account than linears
    assert not spent.eager_overspent(Spec(recipe=CHEAP, model="mlp_gelu"))
    spend(1.0, model="mlp_gelu")
    spend(30.0, model="two_blocks", recipe=DEAR)
    assert spent.eager_overspent(Spec(recipe=CHEAP, model="two_blocks"))
    assert not spent.eager_overspent(Spec(recipe=CHEAP, model="dropout"))


@pytest.mark.parametrize(("seconds", "more"), [(10.0, 20.0), (100.0, 200.0)])
def test_compiled_slices_wait_above_half_of_the_time_and_later_above_three_quarters(
    seconds: float, more: float
) -> None:
    clock = Clock()
    spent, unlimited = TimeSpent(clock, limits=True), TimeSpent(clock, limits=False)

    def spend(seconds: float, compiled: bool) -> bool:
        with spent.on_slice(compiled), unlimited.on_slice(compiled):
            clock.now += seconds
        assert not unlimited.compiled_overspent()
        return spent.compiled_overspent()

    assert not spend(seconds, compiled=False) and not spend(seconds, compiled=True)
    assert spend(more, compiled=True) is (seconds == 10.0)
    assert spend(more, compiled=True)
