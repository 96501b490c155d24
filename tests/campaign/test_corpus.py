"""``run --corpus``: cases that have shown something are tried first, and near them; what finds
something is added."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fresh import command
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.corpus import Corpus, keep, load, playable, shipped
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.neighbours import neighbours
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.recipe.recipe import load_recipes

RECIPES = load_recipes()
PLAIN = Case(spec=Spec(recipe="torch.bf16", m=7, bias=True), data=DataSpec(seed=3))
BLOCK = Spec(recipe="torchao.float8.rowwise", model="joined_blocks", checkpoint="selective")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "corpus"
    other = Case(spec=BLOCK, data=DataSpec())
    assert load(folder) == Corpus(), "a folder that is not there yet holds nothing"
    assert keep(folder, [PLAIN, other, PLAIN]) == 2
    assert keep(folder, [PLAIN]) == 0
    assert {case.id for case in load(folder).cases} == {PLAIN.id, other.id}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ('{"spec": {"recipe": "torch.bf16"}, "data": {}, "schema": 99}', "schema 99"),
        ('{"spec": {"recipe": "torch.bf16", "colour": 1}, "data": {}, "schema": 6}', "colour"),
    ],
)
def test_what_cannot_be_read_is_said_and_left_out(tmp_path: Path, text: str, why: str) -> None:
    keep(tmp_path, [PLAIN])
    (tmp_path / "odd.json").write_text(text)
    found = load(tmp_path)
    assert found.cases == (PLAIN,)
    (sentence,) = found.unread
    assert "odd.json" in sentence and why in sentence


def test_a_case_of_an_older_schema_is_read(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(
        '{"spec": {"recipe": "torch.bf16", "m": 3}, "data": {"seed": 1}, "schema": 5}'
    )
    (case,) = load(tmp_path).cases
    assert case.spec.m == 3 and case.data.seed == 1


def test_a_file_is_no_folder_and_a_folder_may_be_closed(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: name a folder"):
        load(file)
    with pytest.raises(ValueError, match="cannot write to --corpus"):
        keep(file / "below", [PLAIN])


def test_only_what_can_be_played_here_is_tried() -> None:
    compiled = Case(spec=Spec(recipe="torch.bf16", compile="inductor"), data=DataSpec())
    unknown = Case(spec=Spec(recipe="torch.bf17"), data=DataSpec())
    refused = Case(
        spec=Spec(recipe="torch.bf16", model="attention", sharding=Sharding(experts=2, data=2)),
        data=DataSpec(),
    )
    every = [PLAIN, PLAIN, compiled, unknown, refused]
    assert playable(every, RECIPES, ()) == (PLAIN, compiled)
    assert playable(every, RECIPES, ("eager",)) == (PLAIN, compiled), "it runs eagerly, too"
    assert playable([compiled, PLAIN], RECIPES, ("inductor",)) == (compiled,)


def test_the_shipped_cases_are_read_and_can_be_played() -> None:
    found = load(shipped())
    assert found.unread == ()
    assert 20 < len(found.cases) < 200, "few enough that a run has time for them"
    here = [case for case in found.cases if case.spec.recipe in RECIPES]
    assert len(playable(here, RECIPES, ())) == len(here)
    assert any(case.spec.sharded for case in here) and any(case.spec.events for case in here)
    assert {case.spec.compile for case in here} >= {"none", "inductor", "aot_eager"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "spec",
    [
        BLOCK,
        PLAIN.spec,
        Spec(recipe="torch.fp32", dtype="fp32", model="sdpa", m=17, k=16, n=33),
        Spec(recipe="torch.bf16", model="mlp_swiglu", sharding=Sharding(data=2, tensor=2)),
        Spec(recipe="torchao.mxfp8.rceil", model="llama_block", compile="inductor"),
    ],
    ids=lambda spec: spec.model,
)
def test_a_neighbour_differs_in_little_and_can_be_played(spec: Spec) -> None:
    recipe = RECIPES[spec.recipe]
    found = examples(neighbours(spec, recipe), 60)
    for near in found:
        recipe.check(near)
        assert (near.recipe, near.model, near.compile) == (spec.recipe, spec.model, spec.compile)
        assert near.sharded == spec.sharded
    others = {near for near in found if near != spec}
    assert len(others) > 10, "most draws are others"
    if not (spec.sharded or spec.model == "sdpa"):  # whose sizes may have to follow
        for near in others:
            names = Spec.__struct_fields__
            assert sum(getattr(near, n) != getattr(spec, n) for n in names) <= 2


def test_the_same_case_with_the_next_seed_of_its_data() -> None:
    first, second = map(PLAIN.reseeded, range(2))
    assert first == PLAIN
    assert second.spec == PLAIN.spec and second.data.seed == PLAIN.data.seed + 1


def generator(tmp_path: Path, cases: Sequence[Case], **how: object) -> Generator:
    config = Config(out=tmp_path, corpus=tuple(map(dump_case, cases)), **how)  # type: ignore[arg-type]

    def plan(spec: Spec) -> Plan:
        return RECIPES[spec.recipe].plan(spec)

    some = [RECIPES["torch.bf16"], RECIPES["torchao.float8.rowwise"]]
    return Generator(config, some, [], random.Random(0), plan)


def served(drawing: Generator, kind: str, slices: int = 1) -> list[Spec]:
    found: list[Spec] = []
    for _ in range(slices):
        drawing.corpus(kind, lambda: True, lambda batch: found.append(batch[0].spec))
    return found


def test_a_slice_tries_each_case_and_then_its_neighbours(tmp_path: Path) -> None:
    drawing = generator(tmp_path, [PLAIN])
    first, *rest = served(drawing, "none")
    assert first == PLAIN.spec
    assert rest and all(spec != PLAIN.spec for spec in rest)
    assert PLAIN.spec not in served(drawing, "none"), "it has been tried"


def test_what_is_compiled_has_neighbours_when_its_turn_comes_again(tmp_path: Path) -> None:
    case = Case(spec=Spec(recipe="torch.bf16", compile="inductor"), data=DataSpec())
    drawing = generator(tmp_path, [case])
    assert served(drawing, "inductor") == [case.spec]
    again = served(drawing, "inductor", slices=4)
    assert again and case.spec not in again


def test_models_that_are_not_asked_for_are_not_tried(tmp_path: Path) -> None:
    block = Case(spec=BLOCK, data=DataSpec())
    drawing = generator(tmp_path, [PLAIN, block], models=("joined_blocks",), linears=False)
    assert {spec.model for spec in served(drawing, "none")} == {"joined_blocks"}


#: Nothing else draws so many rows in so few cases.
PLANT = """
from contextlib import contextmanager
from unittest.mock import patch

import torch
from narrowfuzz import Plant

@contextmanager
def odd():
    linear = torch.nn.functional.linear

    def other(x, weight, bias=None):
        y = linear(x, weight, bias)
        return y * 2 if x.shape[:-1].numel() == 1041 else y

    with patch.object(torch.nn.functional, "linear", other):
        yield

PLANTS = [Plant(id="odd-rows", title="a linear of 1041 rows gives twice as much", source="https://x.org",
                family="other", recipes=("torch.bf16",), plant=odd)]
"""


def run_with(plants: Path, out: Path, *more: object, code: int) -> Any:
    plants.write_text(PLANT)
    done = command(
        "run", "--recipe", "torch.bf16", "--arm", "eager", "--cases", "40", "--workers", "1",
        "--seed", "1", "--plant", f"{plants}:odd-rows", "--json", "--out", out, *more, code=code,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.heavy
@pytest.mark.slow
def test_a_case_of_the_corpus_finds_what_is_hardly_ever_drawn(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    keep(corpus, [Case(spec=Spec(recipe="torch.bf16", m=1041, bias=True), data=DataSpec())])
    summary = run_with(tmp_path / "plants.py", tmp_path / "out", "--corpus", corpus, code=1)
    assert summary["specs_of_corpus"] > 0
    assert 1 < len(load(corpus).cases) <= 1 + len(summary["findings"]), "what was found is added"


@pytest.mark.heavy
def test_without_that_case_it_is_not_found(tmp_path: Path) -> None:
    assert not run_with(tmp_path / "plants.py", tmp_path / "out", code=0)["findings"]
