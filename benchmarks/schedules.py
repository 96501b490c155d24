"""Schedules a second, judged by every rule: five events on one 32-wide linear, and as drawn."""

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

#: Recipe -> schedules of five events a second, at least.
TARGETS = {"reference.delayed": 100.0, "te.delayed": 20.0}
_FIVE = (Open(), Forward(), Close(), Backward(of=(0,)), Step())


def schedules_part(recipe: str, seconds: float) -> dict[str, Any]:
    """Rates of one recipe, a third of the time for each of three rounds."""
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
    """One step; every second one runs with a checkpoint, too, and every fourth in company."""
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
