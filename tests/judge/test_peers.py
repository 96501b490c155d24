"""The recipes that R21 compares with: those that run here, on a backend that runs here."""

from __future__ import annotations

from dataclasses import replace

from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import power_of_two_peers
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.recipe.recipe import Recipe, load_recipes

MINE, OTHER = "torchao.mxfp8.rceil_wgrad_with_hp", "torchao.mxfp8.rceil"
RECIPES = {name: recipe for name, recipe in load_recipes().items() if name in (MINE, OTHER)}
SPEC = Spec(recipe=MINE)


def without(recipe: Recipe, *backends: str) -> Recipe:
    def unavailable(backend: str, device: str) -> str:
        return "it is missing" if backend in backends else recipe.unavailable(backend, device)

    return replace(recipe, unavailable=unavailable)


def peers(other: Recipe) -> dict[str, tuple[Spec, Plan]]:
    return power_of_two_peers({**RECIPES, OTHER: other}, SPEC, "cpu")


def test_a_backend_that_does_not_run_here_is_not_compared_with() -> None:
    assert {name: spec.backend for name, (spec, _) in peers(RECIPES[OTHER]).items()} == {OTHER: ""}
    first, *others = RECIPES[OTHER].backends
    assert {spec.backend for spec, _ in peers(without(RECIPES[OTHER], first)).values()} < {*others}
    assert not peers(without(RECIPES[OTHER], first, *others))


def test_its_operands_are_compared_on_the_backend_that_runs() -> None:
    recipes = {**RECIPES, OTHER: without(RECIPES[OTHER], RECIPES[OTHER].backends[0])}
    verdicts = Judge(recipes, Ledger([])).judge(Case(spec=SPEC, data=DataSpec())).verdicts
    compared = [v for v in verdicts if v.rule == "R21"]
    # grad_weight is a product of unquantised operands
    assert {v.status for v in compared} == {"ok", "inconclusive"}
