"""What ``narrowfuzz list coverage`` says is what is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import pytest
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.spec import Checkpoint
from narrowfuzz.draw import factors
from narrowfuzz.models.catalog import COMPOSED
from narrowfuzz.recipe.recipe import load_recipes, runnable
from samples import recipes

#: One worker draws for all of them.
pytestmark = pytest.mark.xdist_group("drawn factors")


class Row(NamedTuple):
    drawn: str
    unfit: str
    lacking: str


def rows_of(*names: str) -> dict[tuple[str, str], Row]:
    chosen = {name: replace(recipes()[name], backends=("one",)) for name in names}
    return {(name, factor): Row(*told) for name, factor, *told in factors.rows(chosen)}


@pytest.fixture(scope="module")
def told() -> dict[str, Row]:
    name = "torchao.float8.rowwise"
    return {factor: row for (_, factor), row in rows_of(name).items()}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("factor", "kinds"),
    [("checkpoint", Checkpoint), ("compile", Compile), ("model", Literal[COMPOSED])],
)
def test_what_is_drawn_is_counted(told: dict[str, Row], factor: str, kinds: object) -> None:
    row = told[factor]
    assert not row.lacking
    shares = dict(part.rsplit(" ", 1) for part in row.drawn.split(", "))
    assert set(shares) == set(get_args(kinds))
    assert 98 <= sum(int(share.removesuffix("%")) for share in shares.values()) <= 108


@pytest.mark.heavy
def test_a_weight_used_twice_meets_every_rung_and_dropout_every_checkpoint(
    told: dict[str, Row],
) -> None:
    for factor in ("compile of used_twice", "compile of tied_embedding", "checkpoint of dropout",
                   "checkpoint of used_twice", "checkpoint of tied_embedding"):  # fmt: skip
        assert not told[factor].lacking, factor


def test_every_recipe_that_is_listed_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGER_DRAWS", "COMPILED_DRAWS"):
        monkeypatch.setattr(factors, name, factors._LOT)
    able = {n: here for n, r in load_recipes().items() if (here := runnable(r, "cpu"))}
    assert "te.experts" in able  # which is never compiled
    assert {name for name, *_ in factors.rows(able)} == set(able)


@pytest.mark.heavy
def test_what_cannot_be_drawn_has_a_reason() -> None:
    rows = rows_of("torchao.mxfp8.floor", "torch.bf16")
    assert rows["torchao.mxfp8.floor", "dtype"][1:] == (
        "fp16: mx_tensor.py to_mx asserts bf16 or fp32", "",
    )  # fmt: skip
    assert rows["torch.bf16", "autocast"].unfit.startswith("True: it takes no fp32")
    assert rows["torch.bf16", "checkpoint of tied_embedding"].unfit.startswith("reentrant: token")


def test_what_is_not_drawn_without_a_reason_is_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "EAGER_DRAWS", 10)
    monkeypatch.setattr(factors, "COMPILED_DRAWS", 0)
    recipe = recipes()["torchao.mxfp8.floor"]
    rows = factors.rows({"one": replace(recipe, leaves_out={}, autocast=None)})
    lacking = {factor: row[-1] for _, factor, *row in rows}
    assert lacking["dtype"].split(", ")[-1] == "fp16" and "True" in lacking["autocast"]


def test_no_recipe_that_runs_here_has_a_hole_of_its_own() -> None:
    """What a recipe takes is drawn or has a reason, and every reason is one of a value."""
    for recipe in recipes().values():
        for value in recipe.leaves_out:
            field, _, name = value.partition("=")
            assert name not in recipe.dtypes if field == "dtype" else field == "autocast"
        if runnable(recipe, "cpu"):
            lacking = {"fp32", "bf16", "fp16"} - set(recipe.dtypes)
            assert {f"dtype={name}" for name in lacking} <= set(recipe.leaves_out), recipe.name


@pytest.mark.heavy
def test_compiler_settings_are_counted_where_something_is_compiled(told: dict[str, Row]) -> None:
    assert told["fullgraph"].drawn.startswith(("True 5", "False 5", "True 6", "False 6"))
