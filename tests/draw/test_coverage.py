"""Pairs of features: the universe is what the generator can draw, no more and no less."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import draws
import msgspec
import pytest
from narrowfuzz.arms.available import natives, rungs_of, select_arms, unavailable
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.campaign.slices import AGAIN, FIRST
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.coverage import DIMENSIONS, Pair, features, missing, pairs, table, universe
from narrowfuzz.draw.specs import specs, trainings
from narrowfuzz.draw.strategies import batches, cases
from narrowfuzz.numerics.accumulator import CPU, HOPPER, Accumulators
from narrowfuzz.recipe.recipe import runnable
from samples import recipes

#: One worker draws for all of them.
pytestmark = pytest.mark.xdist_group("drawn cases")
RECIPES = {n: able for n, r in recipes().items() if (able := runnable(r, "cpu"))}
RUNGS: tuple[Compile, ...] = get_args(Compile)
NATIVE = natives(BY_NAME, "cpu")
WHOLE = universe(RECIPES, RUNGS, native=NATIVE)
SIMPLEST = Case(spec=Spec(recipe="torch.fp32", dtype="fp32"), data=DataSpec())


@cache
def drawn(rung: Compile, count: int = 100) -> tuple[Case, ...]:
    return tuple(draws.drawn_apart(cases(list(RECIPES.values()), compile=rung), count))


def seen(cases_: tuple[Case, ...]) -> set[Pair]:
    return {pair for case in cases_ for pair in pairs(case)}


def with_spec(**changes: object) -> Case:
    return msgspec.structs.replace(SIMPLEST, spec=msgspec.structs.replace(SIMPLEST.spec, **changes))


def test_a_case_has_one_feature_of_each_dimension_and_every_pair_of_them() -> None:
    assert tuple(name for name, _ in features(SIMPLEST)) == DIMENSIONS
    found = pairs(SIMPLEST)
    assert len(found) == len(set(found)) == 15
    assert all(set(pair) <= set(features(SIMPLEST)) for pair in found)


@pytest.mark.parametrize(
    ("case", "feature"),
    [
        (SIMPLEST, ("rung", "eager")),
        (with_spec(compile="inductor"), ("rung", "inductor")),
        (with_spec(kernels="native"), ("rung", "eager_native")),
        (with_spec(kernels="both"), ("rung", "eager_native")),
        (with_spec(kernels="native", compile="inductor"), ("rung", "inductor")),
        (SIMPLEST, ("dtype", "fp32")),
        (with_spec(autocast=True), ("dtype", "fp32+autocast")),
        (with_spec(model="two_blocks"), ("model", "two_blocks")),
        (with_spec(checkpoint="selective"), ("checkpoint", "selective")),
        (SIMPLEST, ("data", "gaussian")),
        (msgspec.structs.replace(SIMPLEST, data=DataSpec(values="outlier")), ("data", "outlier")),
        # on the lattice the value class shapes nothing
        (
            msgspec.structs.replace(SIMPLEST, data=DataSpec(regime="lattice", values="outlier")),
            ("data", "lattice"),
        ),
    ],
)
def test_a_feature_says_what_ran(case: Case, feature: tuple[str, str]) -> None:
    assert feature in features(case)


@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_is_drawn_that_is_not_in_the_universe(rung: Compile) -> None:
    assert not seen(drawn(rung)) - WHOLE


@pytest.mark.heavy
def test_every_pair_without_the_rung_is_drawn_by_and_by() -> None:
    """Most of them within so many cases; what never comes would be an impossible pair."""
    wanted = {pair for pair in WHOLE if not {"rung", "schedule"} & dict(pair).keys()}
    met = seen(drawn("none", 2400)) & wanted
    assert len(met) > 0.8 * len(wanted)


@pytest.mark.heavy
def test_every_kind_of_pair_meets_for_every_value_of_both_sides() -> None:
    """No value of a dimension is out of another dimension's reach."""
    met = seen(drawn("none", 1700))
    kinds = {(a[0], b[0]) for a, b in WHOLE if "rung" not in (a[0], b[0])}
    for one, two in kinds - {("recipe", "schedule")}:
        there = {(a, b) for a, b in WHOLE if (a[0], b[0]) == (one, two)}
        for side in (0, 1):
            assert {p[side] for p in there} == {p[side] for p in met & there}, (one, two)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["torch.bf16", "torchao.float8.rowwise", "torchao.mxfp8.rceil"])
def test_every_recipe_meets_what_may_happen_to_a_model(name: str) -> None:
    drawn = draws.drawn_apart(trainings([RECIPES[name]]), 400)
    found = seen(tuple(Case(spec=spec, data=DataSpec()) for spec in drawn))
    wanted = {p for p in WHOLE if p[0] == ("recipe", name) and p[1][0] == "schedule"}
    assert wanted <= found, wanted - found


@pytest.mark.parametrize(
    "pair",
    [
        (("recipe", "torch.bf16"), ("dtype", "fp32")),
        (("recipe", "torch.scaled_mm"), ("dtype", "fp32+autocast")),
        (("model", "attention"), ("data", "lattice")),
        (("dtype", "fp32+autocast"), ("data", "lattice")),
        (("model", "tied_embedding"), ("checkpoint", "reentrant")),
    ],
)
def test_what_cannot_be_drawn_is_not_missed(pair: Pair) -> None:
    assert pair not in WHOLE
    assert all((a, b) != pair for rung in RUNGS for a, b in seen(drawn(rung)))


def test_the_universe_follows_the_chosen_recipes_and_rungs() -> None:
    small = universe({"torch.bf16": RECIPES["torch.bf16"]}, ("none",))
    assert small < WHOLE
    assert {v for pair in small for d, v in pair if d == "rung"} == {"eager"}
    assert {v for pair in small for d, v in pair if d == "dtype"} == {"bf16"}


def test_the_table_counts_each_pair_once() -> None:
    met = frozenset(pairs(SIMPLEST)) | {(("model", "of"), ("rung", "another run"))}
    rows = table(met & WHOLE, WHOLE)
    assert [row[0] for row in rows][:2] == ["recipe x model", "recipe x rung"]
    assert [met for name, met, _ in rows if name != "all"] == [*[1] * 15, 0]  # nothing happened
    assert rows[-1] == ("all", 15, len(WHOLE)) == ("all", 15, sum(r[2] for r in rows[:-1]))


def test_what_nobody_has_run_is_named() -> None:
    here = pairs(SIMPLEST)
    assert missing(WHOLE, WHOLE) == []
    assert missing(WHOLE - {here[0]}, WHOLE) == ["torch.fp32 x linear"]


@pytest.mark.parametrize(
    ("arms", "rungs"),
    [
        (
            (),
            {
                "eager",
                "eager_native",
                "aot_eager",
                "aot_eager_decomp_partition",
                "inductor",
                "sharded",
            },
        ),
        (("sharded*",), {"sharded"}),
        (("eager*",), {"eager", "eager_native"}),
        (("eager",), {"eager"}),
        (("aot_eager",), {"aot_eager"}),
        (("inductor_strict*",), {"inductor"}),
        (("eager", "inductor"), {"eager", "inductor"}),
    ],
)
def test_a_campaign_misses_no_rung_that_it_never_takes(
    arms: tuple[str, ...], rungs: set[str]
) -> None:
    from narrowfuzz.campaign.campaign import drawable

    if "inductor" in rungs and unavailable(BY_NAME["inductor"]):
        pytest.skip(unavailable(BY_NAME["inductor"]))
    rungs = rungs if NATIVE else rungs - {"eager_native"}
    found = drawable(RECIPES, Config(out=Path(), arms=arms))
    assert {v for pair in found for d, v in pair if d == "rung"} == rungs
    generator = Generator(
        Config(out=Path(), arms=arms),
        list(RECIPES.values()),
        [],
        random.Random(0),
        lambda spec: RECIPES[spec.recipe].plan(spec),
    )
    slices = generator.slices((*FIRST, *AGAIN), rungs_of(select_arms(arms)))
    taken = {"eager" if s.kind == "none" else s.kind for s in slices}
    assert taken == rungs - {"eager_native"}
    assert ("kernels" in generator.vary) == (NATIVE and arms in ((), ("eager*",)))


@pytest.mark.heavy
def test_a_worker_draws_ladders_where_its_device_adds_otherwise() -> None:
    name = "torchao.float8.tensorwise"
    recipe = replace(RECIPES[name], backends=("real",))

    def drawn_by(table: Accumulators) -> float:
        found: list[bool] = []
        for number in range(4):  # one worker's draws are much alike
            generator = Generator(
                Config(out=Path()), [recipe], [], random.Random(number),
                lambda spec: recipe.plan(spec).added_by(table, spec.dtype),
            )  # fmt: skip
            generator.converted_models("none", "linears", lambda: True, lambda batch: found.append(
                batch[0].data.regime == "ladder"))  # fmt: skip
        return sum(found) / len(found)

    assert 0 < drawn_by(CPU) < 0.25 < 0.35 < drawn_by(HOPPER)


def test_dynamic_rows_add_no_pairs() -> None:
    wanted = batches(specs(list(RECIPES.values()), compile="aot_eager"), draws=3)
    found = draws.drawn_apart(wanted, 20)
    assert any(b[0].spec.dynamic for b in found)
    assert all(seen(b) <= WHOLE for b in found)
