"""How long a case of a large model takes here, measured before any case is judged.

A kernel may be a thousand times slower than another: torch._scaled_mm without FP8 units does some
ten million multiplications a second. So one small linear is run with each requested recipe and
backend.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.data import make_tensors
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.machine.environment import one_thread, quieten
from narrowfuzz.recipe.recipe import FILTERED, Recipe
from narrowfuzz.trace.words import plural

#: A model with fewer multiplications in a forward is judged in seconds with any kernel.
LARGE = 10**8
#: Rows, in_features and out_features of the linear that is run.
_ROWS, _IN, _OUT = 64, 256, 256
#: Forward and backward passes of a case: with and without a checkpoint, each twice to compare.
_RUNS = 4
#: Seconds that a user may wait for the first cases; a longer run is not suggested.
_LONGEST = 3600.0
#: Multiplications of a forward that a core judges in a second: it computes their products in
#: float64 and their tolerances, in forward and backward.
_JUDGED = 8e7


def seconds_of_cases(
    specs: Sequence[Spec], multiplications: int, recipes: Mapping[str, Recipe], device: str
) -> dict[Spec, float]:
    """About how many seconds one case of each Spec takes, for a model whose linears do this number
    of ``multiplications`` in a forward."""
    found: dict[Spec, float] = {}
    quieten()
    with one_thread():
        for spec in specs:
            recipe = recipes[spec.recipe.partition(FILTERED)[0]]
            once = _seconds_of_linear(recipe, spec, device) / (_ROWS * _IN * _OUT)
            found[spec] = multiplications * (_RUNS * once + 1 / _JUDGED)
    return found


def _seconds_of_linear(recipe: Recipe, spec: Spec, device: str) -> float:
    """Seconds for a forward and backward of a linear, when it runs the second time."""
    linear = Spec(
        recipe=recipe.name, backend=spec.backend, dtype=spec.dtype, m=_ROWS, k=_IN, n=_OUT
    )
    recipe.prepare()
    program = Program(linear, recipe, EAGER, device=device)
    tensors = make_tensors(Case(spec=linear, data=DataSpec()), recipe.plan(linear))
    program.run(tensors, tap=False)
    start = time.monotonic()
    program.run(tensors, tap=False)
    return time.monotonic() - start


def said_of_pace(pace: Mapping[Spec, float], first: int, minutes: float | None) -> str:
    """One line: how long a case of each Spec takes, quickest first, and whether the ``first`` cases
    fit into ``minutes``; None: there is no limit."""
    backends = Counter(spec.recipe for spec in pace)
    ways = [
        f"{_in_words(pace[spec])} with {spec.recipe}"
        f"{f' ({spec.backend})' if backends[spec.recipe] > 1 else ''}"
        for spec in sorted(pace, key=pace.__getitem__)
    ]
    text = f"a large model: on one core a case takes about {', '.join(ways)}"
    whole = sum(pace.values()) * first / len(pace)
    if minutes is None or whole < 60 * minutes:
        return text
    text += f". The first {plural(first, 'case')}, quickest first, take about {_in_words(whole)}: "
    smaller = "build the model with fewer tokens, layers or a smaller vocabulary"
    if whole > _LONGEST:
        return text + smaller
    return f"{text}give it --minutes {math.ceil(1.3 * whole / 60)}, or {smaller}"


def _in_words(seconds: float) -> str:
    for unit, size in (("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return plural(round(seconds / size), unit)
    return plural(max(1, round(seconds)), "second")
