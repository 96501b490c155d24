"""Schedules judged per second by every rule: with five events on one 32-wide linear, and as
drawn."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from narrowfuzz.case.events import Backward, Close, Forward, Open, Step
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.strategies import schedule_cases
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.recipe.recipe import load_every

#: Recipe -> least number of schedules of five events per second.
TARGETS = {"reference.delayed": 100.0, "te.delayed": 20.0}
_FIVE = (Open(), Forward(), Close(), Backward(of=(0,)), Step())


def schedules_part(recipe: str, seconds: float) -> dict[str, Any]:
    """Rates for one recipe: of five events, the median of three rounds in half of the time, and of
    drawn schedules in the other half."""
    library = load_every()[recipe]
    library.prepare()
    judge = Judge(load_every(), load_ledger())
    five = [_five(recipe, number) for number in range(400)]
    for case in five[:20]:
        judge.judge(case)  # warm up
    rates = [_rate(judge, five, seconds / 6) for _ in range(3)]
    drawn = _drawn(library, 300)
    return {
        "five": statistics.median(rates),
        "drawn": _rate(judge, drawn, seconds / 2),
        "events": statistics.mean(len(case.spec.events) for case in drawn),
    }


def _five(recipe: str, number: int) -> Case:
    """A schedule of one step. Every second number also has a checkpoint; every fourth checkpoints
    each layer instead of the whole model."""
    spec = Spec(
        recipe=recipe, model="library_linear", events=_FIVE,
        checkpoint="full" if number % 2 else "none", wraps="each" if number % 4 == 1 else "whole",
    )  # fmt: skip
    return Case(spec=spec, data=DataSpec(seed=number))


def _drawn(recipe: Any, count: int) -> list[Case]:
    cases: list[Case] = []

    @seed(1)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(schedule_cases([recipe]))
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def _rate(judge: Judge, cases: list[Case], seconds: float) -> float:
    start, done = time.perf_counter(), 0
    for case in itertools.cycle(cases):
        judge.judge(case)
        done += 1
        if time.perf_counter() - start > seconds:
            break
    return done / (time.perf_counter() - start)
