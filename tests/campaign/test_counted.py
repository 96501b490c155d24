"""Where cases are counted, no clock and no result steers what is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.generator import Generator
from narrowfuzz.case.spec import Case
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.report.tally import Tally

RECIPES = load_recipes()
PLAIN = "torch.fp32"
COUNTED = Config(out=Path(), cases=500)


def drawn(config: Config, clock: Callable[[], float], factor: float) -> list[str]:
    """The ids of the cases of some slices, on a machine with this clock, whose results come so
    close to their bounds."""
    found: list[str] = []
    of = Generator(
        config, [RECIPES[PLAIN]], [], random.Random(3),
        lambda spec: RECIPES[spec.recipe].plan(spec), clock,
    )  # fmt: skip
    near: Any = SimpleNamespace(verdicts=[SimpleNamespace(rule="O6", status="ok", factor=factor)])

    def serve(batch: tuple[Case, ...]) -> None:
        for case in batch:
            found.append(case.id)
            of.remember(case, near)

    for kind, wanted in (("none", "linears"), ("none", "models"), ("inductor", "linears")) * 2:
        of.converted_models(kind, wanted, lambda: True, serve)  # type: ignore[arg-type]
    return found


@pytest.mark.heavy
def test_a_slow_machine_draws_the_same_cases() -> None:
    def steady() -> float:
        return 0.0

    ticks = iter(range(10**6))
    fast = drawn(COUNTED, steady, 0.1)
    assert fast == drawn(COUNTED, lambda: float(100 * next(ticks)), 0.1)
    assert fast == drawn(COUNTED, steady, 0.9)
    assert len(set(fast)) > 50


def test_no_eager_case_runs_twice() -> None:
    """Though Hypothesis draws half of them again: it changes one part of an example at a time."""
    recipe, found = RECIPES[PLAIN], list[str]()
    of = Generator(COUNTED, [recipe], [], random.Random(3), recipe.plan)
    judgement: Any = SimpleNamespace(verdicts=[])

    def serve(batch: tuple[Case, ...]) -> None:
        for case in batch:
            found.append(case.id)
            of.remember(case, judgement)

    for _ in range(4):
        of.converted_models("none", "linears", lambda: True, serve)
        of.converted_models("none", "models", lambda: True, serve)
        of.sharded(lambda: True, serve)
    assert len(found) == len(set(found)) > 100


@pytest.mark.heavy
def test_with_a_time_to_fill_results_steer_what_is_compiled() -> None:
    """Else the test above could not fail."""
    timed = replace(COUNTED, cases=0)
    ticks = iter(range(10**6))
    assert drawn(timed, lambda: 0.0, 0.1) != drawn(timed, lambda: float(100 * next(ticks)), 0.1)


def test_the_digest_is_of_all_workers_in_their_order() -> None:
    one, other = Tally(), Tally()
    one.digests = {(0, 0): "a", (1, 0): "b"}
    other.digests = {(1, 0): "b", (0, 0): "a"}
    assert one.digest == other.digest
    other.digests = {(0, 0): "b", (1, 0): "a"}
    assert one.digest != other.digest
