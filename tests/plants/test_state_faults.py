"""Planted state faults are found by drawn schedules, soon, and nothing is found without them."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import msgspec
import pytest
from draws import drawn
from narrowfuzz.case.events import (
    Backward,
    Close,
    Forward,
    Open,
    Settings,
    Step,
    Switch,
)
from narrowfuzz.case.spec import Case, DataSpec, Dtype, Spec
from narrowfuzz.draw.library_specs import schedules
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe import delayed
from samples import every_recipe

#: One worker draws for all of them.
pytestmark = pytest.mark.xdist_group("state faults")
NAME = "reference.delayed"
#: Within so many different schedules each fault is found.
BUDGET = 200

#: The rules by which the first case that shows a fault may show it.
FOUND_BY: dict[str, set[str]] = {
    "forward-scale-frozen": {"O14"},
    "history-advances-twice": {"O14"},
    "scale-a-step-late": {"O14"},
    "history-never-rolls": {"O14"},
    "history-keeps-oldest": {"O14"},
    "history-cell-short": {"O14"},
    "zero-amax-moves-scale": {"O14"},
    "infinite-amax-zeroes-scale": {"O14"},
    "margin-twice": {"O14"},
    "margin-sign": {"O14"},
    "newest-taken-for-largest": {"O14"},
    "largest-taken-for-newest": {"O14"},
    "weight-gets-inputs-amax": {"O14"},
    "gradient-gets-inputs-amax": {"O14"},
    "amax-overwritten": {"O14"},
    "amax-added": {"O14"},
    "amax-at-first-layers-index": {"O14"},
    "state-shared-by-layers": {"O14"},
    "history-length-kept": {"O14"},
    "saved-without-history": {"O14", "R20"},
    "saved-without-scale": {"O14", "R20"},
    "backward-scale-frozen-by-checkpoint": {"O14", "O12"},
    "update-at-each-node": {"O14"},
    "update-before-maxima": {"O14", "O19"},
    "update-keyed-to-last-forward": {"O14", "O12"},
    "first-layer-owns-update": {"O14"},
    "inner-region-updates": {"O14"},
    "idle-history-rolls": {"O14"},
    "update-lost-at-evaluation": {"O14", "O12"},
    "evaluation-stages": {"O14"},
    "state-outlives-model": {"O1", "O12", "O14"},
    "recompute-default-recipe": {"O14", "O20"},
    "recompute-high-precision": {"contract", "O12"},
    "recompute-stages": {"O14", "O19"},
    "recompute-commits": {"O14"},
    "recompute-newest-scale": {"O13"},
    "recompute-first-in-first-out": {"O1", "O13", "O14", "O20", "contract"},
    "tape-of-dropped-forward": {"O1", "O13", "contract"},
    "tape-stays-open": {"O1", "O14", "O19"},
    "stash-decided-at-entry": {"contract"},
    "backward-reads-live-scale": {"O3"},
    "microbatches-mix-scales": {"O3", "O12"},
    "microbatches-mix-codes": {"O3", "O12"},
    "input-cast-again": {"O3", "O14", "O19"},
    "column-copy-stale": {"O3", "R20"},
    "weight-workspace-stale": {"O3", "R20"},
    "weight-cache-stale": {"O3", "O20", "R20"},
    "kept-weight-newer-scale": {"O3", "O12"},
    "weight-cache-unfilled": {"O3", "O13"},
    "cast-unsaturated": {"O2", "O14"},
    "bias-added-twice": {"O22"},
    "bias-never-added": {"O22"},
}


@cache
def cases() -> tuple[Case, ...]:
    """The same different schedules each time, over dtypes, bias and data."""
    recipe = every_recipe()[NAME]
    different = dict.fromkeys(drawn(schedules(NAME, carries=recipe.carries()), 3 * BUDGET, start=1))
    return tuple(
        case(spec, dtype=recipe.dtypes[i % 2], bias=i % 3 == 0, data=i)
        for i, spec in enumerate(list(different)[:BUDGET])
    )


def case(spec: Spec, *, dtype: Dtype = "bf16", bias: bool = True, data: int = 0) -> Case:
    spec = msgspec.structs.replace(spec, dtype=dtype, bias=bias)
    return Case(spec=spec, data=DataSpec(seed=data))


def library(**fields: Any) -> Spec:
    return Spec(recipe=NAME, model="library_linear", **fields)


@cache
def judge() -> Judge:
    return Judge(every_recipe(), Ledger([]))


def first_found(fault: Plant) -> tuple[int, Judgement]:
    """The number of cases it took, and what the last of them showed."""
    with fault.plant():
        for number, case in enumerate(cases(), 1):
            judgement = judge().judge(case)
            if judgement.causes:
                return number, judgement
    raise AssertionError(f"{fault.id}: not found in {len(cases())} schedules")


def host() -> dict[str, dict[str, Any]]:
    """Everything of the host that a fault could leave changed."""
    owners = (delayed, delayed.DelayedLinear, delayed._Product, delayed._State, delayed._Tape)
    return {owner.__name__: dict(vars(owner)) for owner in owners}


def state_faults() -> dict[str, Plant]:
    return {id: fault for id, fault in builtin_faults().items() if fault.recipes == (NAME,)}


def test_every_state_fault_has_its_rules() -> None:
    assert set(FOUND_BY) == set(state_faults())


@pytest.mark.one_in(30)
@pytest.mark.parametrize("id", FOUND_BY)
def test_a_fault_is_found_and_then_gone(id: str) -> None:
    before, _ = host(), cases()
    started = time.perf_counter()
    number, judgement = first_found(state_faults()[id])
    took = time.perf_counter() - started
    first = judgement.causes[0]
    print(f"{id:36} {number:4} {took:6.2f} s  {first.rule} {first.arm}: {first.symptom}")
    assert {verdict.rule for verdict in judgement.causes} <= FOUND_BY[id]
    assert host() == before
    assert not judge().judge(judgement.case).causes


@pytest.mark.one_in(12)
@pytest.mark.parametrize("part", range(12))
def test_nothing_is_found_without_a_fault(part: int) -> None:
    for case in cases()[part::12]:
        causes = judge().judge(case).causes
        assert not causes, (causes[0].sentence(), case)


IN, OUT, STEP = Open(), Close(), Step()


def test_a_recompute_of_an_older_recipe_leaves_the_newer_history() -> None:
    events = (
        *(IN, Forward(), OUT, Switch(history=2), IN, Forward(), OUT),
        *(Backward(of=(0,)), Backward(of=(1,)), STEP),
    )
    for checkpoint in ("full", "reentrant"):
        spec = library(events=events, checkpoint=checkpoint)
        assert not judge().judge(case(spec)).causes


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_weights_that_are_no_numbers_leave_no_mark_in_the_history(algorithm: Any) -> None:
    """A forward in high precision on an infinity: its gradients, so the next weights, are NaN."""
    more = tuple(
        event for f in (1, 2, 3) for event in (IN, Forward(), OUT, Backward(of=(f,)), STEP)
    )
    spec = library(
        events=(Forward(values="inf"), Backward(of=(0,)), STEP, *more),
        depth=3,
        checkpoint="full",
        wraps="each",
        settings=Settings(history=2, algorithm=algorithm),
    )
    assert not judge().judge(case(spec)).causes
