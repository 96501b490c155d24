"""Finds ways to avoid a library's refusal by trying them, as help for a user who met it.

It tries another backend, a filter that leaves the layer out, and other sizes. Each size is tried at
odd multiples of increasing powers of two, so the first that runs is the multiple that the library
requires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

import msgspec

from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import LARGEST, Case, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import FILTERED, Recipe, obstacles, with_filter
from narrowfuzz.rules import BY_NAME
from narrowfuzz.trace.expect import Refuses, Runs
from narrowfuzz.trace.trace import ErrorPhase
from narrowfuzz.trace.verdict import Verdict

_MULTIPLES = (16, 32, 64, 128, 256, 512)
_SECONDS = 20.0
#: Runs a Spec and returns whether it ran to its end.
Try = Callable[[Spec], bool]


def avoided_by(judge: Judge, case: Case, verdict: Verdict) -> list[str]:
    """Phrases that each name a change with which the case runs to its end. Empty if the verdict is
    not about an exception of a converted model, and for compiled arms, where trying takes long."""
    raised = isinstance(verdict.expect, Runs | Refuses) and verdict.expect.raised
    if not raised or verdict.role not in get_args(ErrorPhase):
        return []
    if case.history or ARMS[verdict.arm].compiler:
        return []
    recipe = judge.recipe(case.spec)
    runs = _Tries(judge, case, verdict.arm, time.monotonic() + _SECONDS)
    return [
        *_backends(judge, recipe, case, runs),
        *_filter(judge, recipe, case, verdict, runs),
        *_sizes(case.spec, runs),
    ]


class _Tries:
    """Runs a Spec on the guilty arm with the case's data and returns whether it ran to its end;
    after the deadline it runs nothing and returns False."""

    def __init__(self, judge: Judge, case: Case, arm: str, deadline: float) -> None:
        self.judge, self.case, self.arm, self.deadline = judge, case, arm, deadline

    def __call__(self, spec: Spec) -> bool:
        if time.monotonic() > self.deadline:
            return False
        try:
            self.judge.recipe(spec).check(spec)
        except ValueError:  # such as rows that do not divide evenly over the ranks
            return False
        case = msgspec.structs.replace(self.case, spec=spec)
        arms = frozenset({self.arm})
        return self.judge.judge(case, [BY_NAME["contract"]], arms, confirm=False).ran


def _backends(judge: Judge, recipe: Recipe, case: Case, runs: Try) -> Iterator[str]:
    lacking = obstacles(recipe, judge.device.torch)
    for backend in recipe.backends:
        other = msgspec.structs.replace(case.spec, backend=backend)
        if backend != recipe.backend(case.spec) and backend not in lacking and runs(other):
            yield f"backend {backend}"


def _filter(
    judge: Judge, recipe: Recipe, case: Case, verdict: Verdict, runs: _Tries
) -> Iterator[str]:
    layer = verdict.at.layer.removeprefix("model.")
    if not layer or FILTERED in recipe.name or not recipe.filtered:
        return
    other = with_filter(recipe, f"!{layer}")
    spec = msgspec.structs.replace(case.spec, recipe=other.name)
    there = replace(judge, recipes={**judge.recipes, other.name: other})
    if _Tries(there, case, runs.arm, runs.deadline)(spec):
        yield f"{layer} left out, recipe {other.name}"


def _sizes(spec: Spec, runs: Try) -> Iterator[str]:
    """For each size, the first multiple not met by the present size with which the Spec runs. None
    of a user's own model, whose file sets them."""
    if spec.model in MODELS and MODELS[spec.model].own:
        return
    names = {"m": "rows", "k": "width", "n": "out_features or hidden width"}
    if spec.model in MODELS and MODELS[spec.model].takes_ids:
        names["n"] = "vocabulary"
    for name, words in names.items():
        size = getattr(spec, name)
        for multiple in _MULTIPLES:
            other = multiple * (-(-size // multiple) | 1)
            changed = msgspec.structs.replace(spec, **{name: other})
            if size % multiple and other <= LARGEST and runs(changed):
                yield f"{words} a multiple of {multiple}, {other} instead of {size}"
                break
