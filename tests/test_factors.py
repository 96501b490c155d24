"""What ``narrowfuzz list coverage`` says is what is drawn."""

from __future__ import annotations

from typing import get_args

import pytest
from narrowfuzz import factors
from narrowfuzz.case import Checkpoint, Compile, ModelName
from narrowfuzz.recipe import load_recipes


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[str, str]]:
    name = "torchao.float8.rowwise"
    found = factors.rows({name: load_recipes()[name]})
    return {factor: (drawn, lacking) for recipe, factor, drawn, lacking in found}


@pytest.mark.parametrize(
    ("factor", "kinds"), [("checkpoint", Checkpoint), ("compile", Compile), ("model", ModelName)]
)
def test_what_is_drawn_is_counted(
    told: dict[str, tuple[str, str]], factor: str, kinds: object
) -> None:
    drawn, lacking = told[factor]
    assert not lacking
    shares = dict(part.rsplit(" ", 1) for part in drawn.split(", "))
    assert set(shares) == set(get_args(kinds))
    assert 98 <= sum(int(share.removesuffix("%")) for share in shares.values()) <= 108


def test_what_is_not_drawn_is_said(told: dict[str, tuple[str, str]]) -> None:
    assert told["dtype"][1] == "fp16" and told["autocast"][1] == "True"


def test_compiler_settings_are_counted_where_something_is_compiled(
    told: dict[str, tuple[str, str]],
) -> None:
    assert told["fullgraph"][0].startswith(("True 5", "False 5", "True 6", "False 6"))
