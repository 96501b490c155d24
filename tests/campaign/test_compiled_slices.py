"""What slices on compiled rungs draw: each compile is dear, so none is of what shows least."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.campaign.slices import AGAIN, FIRST, Models, Slice, in_turn
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.spec import Case, DataSpec, ModelName, Spec
from narrowfuzz.recipe.recipe import load_recipes

RECIPES = load_recipes()
PLAIN = "torch.fp32"


def generator() -> Generator:
    return Generator(
        Config(out=Path()), [RECIPES[PLAIN]], [], random.Random(1),
        lambda spec: RECIPES[spec.recipe].plan(spec),
    )  # fmt: skip


def drawn(slices: int, a_slice: int) -> list[Spec]:
    """The Specs of so many slices that have time for so many each."""
    found: list[Spec] = []
    of = generator()
    for _ in range(slices):
        until = len(found) + a_slice
        of.converted_models(
            "aot_eager_decomp_partition", "small", lambda until=until: len(found) < until,
            lambda batch: found.append(batch[0].spec),
        )  # fmt: skip
    return found


@pytest.mark.heavy
def test_a_model_that_a_slice_had_no_time_for_has_its_turn_in_the_next() -> None:
    small = generator().small
    assert len(small) > 10
    assert {spec.model for spec in drawn(slices=12, a_slice=2)} == set(small)


@pytest.mark.heavy
def test_the_simplest_spec_is_left_to_others() -> None:
    for spec in drawn(slices=3, a_slice=2):
        assert spec != Spec(
            recipe=spec.recipe, model=spec.model, backend=spec.backend, dtype=spec.dtype,
            compile=spec.compile,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("linears", "linear"), ("small", "mlp_gelu"), ("models", "two_blocks"),
        ("either", "two_blocks"), ("recomputed", ""),
    ],
)  # fmt: skip
def test_what_came_close_is_compiled_in_a_slice_of_its_model(wanted: Models, taken: str) -> None:
    of, models = generator(), tuple[ModelName, ...](("linear", "mlp_gelu", "two_blocks"))
    of.near_bound = [
        (0.1 * i, Case(spec=Spec(recipe=PLAIN, model=model), data=DataSpec()))
        for i, model in enumerate(models)
    ]
    batch = of._closest("inductor", wanted)
    assert [(case.spec.model, case.spec.compile) for case in batch] == (
        [(taken, "inductor")] if taken else []
    )
    assert len(of.near_bound) == (2 if taken else 3)


def test_where_no_linear_is_drawn_a_model_is_whatever_a_slice_holds_still() -> None:
    config = Config(out=Path(), linears=False, models=("mlp_gelu",))
    of = Generator(
        config, [RECIPES[PLAIN]], [], random.Random(1),
        lambda spec: RECIPES[spec.recipe].plan(spec),
    )  # fmt: skip
    of.vary -= {"model"}
    found: list[str] = []
    of.converted_models(
        "aot_eager", "either", lambda: not found, lambda batch: found.append(batch[0].spec.model)
    )
    assert set(found) == {"mlp_gelu"}


def test_what_no_compiler_sees_has_no_slice_on_a_compiled_rung() -> None:
    """Triton's interpreter, say: there would be no backend to draw."""
    seen, unseen = RECIPES[PLAIN], replace(RECIPES[PLAIN], eager=RECIPES[PLAIN].backends)
    for recipe, compiled in ((seen, True), (unseen, False)):
        of = Generator(Config(out=Path()), [recipe], [], random.Random(1), recipe.plan)
        kinds = {one.kind for one in of.slices(FIRST, get_args(Compile))}
        assert "none" in kinds and bool(kinds - {"none", "sharded"}) == compiled


def served(first: list[Slice], again: list[Slice], seconds: float, end: float) -> list[Slice]:
    """The slices that are served in this time, if each compiled one takes ``seconds`` and the
    compiler may have half of the time."""
    spent, found = {True: 0.0, False: 0.0}, []
    for now in in_turn(first, again, lambda: spent[True] > spent[False]):
        found.append(now)
        spent[now.compiled] += seconds if now.compiled else now.seconds
        if sum(spent.values()) > end:
            return found
    raise AssertionError("slices come for ever")


def test_compiled_slices_wait_while_the_compiler_has_had_its_share() -> None:
    """However long they take; and of each kind every slice has its turn, in order."""
    quick, slow = (served([*FIRST], [*AGAIN], seconds, 3000.0) for seconds in (0.5, 60.0))
    in_order = itertools.islice(itertools.chain(FIRST, itertools.cycle(AGAIN)), len(quick))
    assert quick == [*in_order]
    assert 24 <= sum(one.compiled for one in slow) <= 26, "half of fifty minutes"
    for compiled in (True, False):
        mine = [one for one in slow if one.compiled == compiled]
        order = itertools.chain(FIRST, itertools.cycle(AGAIN))
        kind = (one for one in order if one.compiled == compiled)
        assert mine == [*itertools.islice(kind, len(mine))]


def test_compiled_slices_do_not_wait_for_others_that_do_not_come() -> None:
    alone = [one for one in AGAIN if one.compiled]
    assert len(served([], alone, 60.0, 3000.0)) == 51
