"""Seconds are dealt, not cases: what is dear here starves nobody."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.campaign.shares import Shares
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


def test_where_all_cost_the_same_all_have_their_turns() -> None:
    shared = spent(1.0)
    assert min(shared.values()) > 0.5 * max(shared.values()) > 5.0


def test_a_share_counts_what_is_paid_by_the_clock() -> None:
    clock = Clock()
    shares = Shares(clock)

    def pay(seconds: float, **spec: Any) -> None:
        def serve() -> None:
            clock.now += seconds

        shares.pay(Spec(**{"recipe": CHEAP, **spec}), serve)

    pay(30.0)
    assert not shares.overspent(Spec(recipe=CHEAP))  # there is nobody else yet
    pay(1.0, recipe=DEAR)
    assert shares.overspent(Spec(recipe=CHEAP)) and not shares.overspent(Spec(recipe=DEAR))
    # models are another account than linears
    assert not shares.overspent(Spec(recipe=CHEAP, model="mlp_gelu"))
    pay(1.0, model="mlp_gelu")
    pay(30.0, model="two_blocks", recipe=DEAR)
    assert shares.overspent(Spec(recipe=CHEAP, model="two_blocks"))
    assert not shares.overspent(Spec(recipe=CHEAP, model="dropout"))
