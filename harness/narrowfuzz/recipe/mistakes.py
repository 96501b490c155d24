"""Mistakes in a recipe of a user's own that show before a model is converted."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.plan import Plan

if TYPE_CHECKING:
    from narrowfuzz.recipe.recipe import Recipe

#: The folder of the package, whose frames a user does not look at.
_OURS = str(Path(__file__).parents[1])


def mistake_in(recipe: Recipe) -> str:
    """What is wrong with the plans of a recipe's backends, or with its tap, and where; "" if
    nothing is. A plan may raise for what its recipe refuses or does not run here: on a CPU, as it
    is not known yet where it will run."""
    from narrowfuzz.recipe.recipe import obstacles

    if inspect.isgeneratorfunction(recipe.tap):
        return "tap is a generator: write @contextmanager (of contextlib) above it"
    if recipe.source.needs:
        for backend in recipe.backends:
            spec = Spec(recipe=recipe.name, backend=backend, dtype=recipe.dtypes[0])
            wrong = _mistake_in_plan(recipe, spec)
            if wrong and not (backend in obstacles(recipe, "cpu") or recipe.refusal(spec, "cpu")):
                return wrong
    return ""


def _mistake_in_plan(recipe: Recipe, spec: Spec) -> str:
    try:
        plan = recipe.plan(spec)
    except Exception as error:  # noqa: BLE001 (a user's code)
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not f.filename.startswith((_OURS, "<"))]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        return f"plan raised {type(error).__name__}: {error}{where}"
    if isinstance(plan, Plan):
        return ""
    return f"plan returned {type(plan).__name__}: it must return a narrowfuzz.Plan"
