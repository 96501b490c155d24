"""Pairwise coverage: which recipe has met which model, rung, checkpoint, dtype and data class.

Most bugs of this field need two things to meet, so pairs are what a campaign counts. A pair that
the generator cannot draw is not in the universe; one that it can and has not, is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import get_args

from narrowfuzz.arm import EAGER, EAGER_NATIVE
from narrowfuzz.case import Case, Checkpoint, Compile, ModelName, Spec
from narrowfuzz.recipe import Recipe
from narrowfuzz.schedule import of_models
from narrowfuzz.schedule.stimulus import census, possible
from narrowfuzz.stateful import Stateful
from narrowfuzz.strategies import EXACT, WILD
from narrowfuzz.trainings import not_reentrant

#: (dimension, value).
Feature = tuple[str, str]
Pair = tuple[Feature, Feature]

DIMENSIONS = ("recipe", "model", "rung", "checkpoint", "dtype", "data")


def features(case: Case) -> tuple[Feature, ...]:
    """One value of each dimension."""
    spec, data = case.spec, case.data
    return (
        ("recipe", spec.recipe),
        ("model", spec.model),
        ("rung", _rung(spec)),
        ("checkpoint", spec.checkpoint),
        ("dtype", f"{spec.dtype}+autocast" if spec.narrowed else spec.dtype),
        ("data", data.values if data.regime == "wild" else data.regime),
    )


def _rung(spec: Spec) -> str:
    """The dearest; in eager cases the one of PyTorch's own kernels, if it was climbed."""
    if spec.compile != "none":
        return spec.compile
    return (EAGER if spec.kernels == "default" else EAGER_NATIVE).name


def pairs(case: Case) -> tuple[Pair, ...]:
    """Every pair of features that meets in this case; a schedule's features meet its recipe."""
    recipe = ("recipe", case.spec.recipe)
    if case.spec.schedule is not None:
        return tuple((recipe, ("schedule", name)) for name in sorted(census(case.spec.schedule)))
    happened = sorted(of_models.features(case.spec.events))
    met = tuple((recipe, ("schedule", name)) for name in happened)
    return (*combinations(features(case), 2), *met)


def universe(
    recipes: Mapping[str, Recipe],
    rungs: Collection[Compile],
    stateful: Mapping[str, Stateful] | None = None,
    *,
    native: bool = False,
) -> frozenset[Pair]:
    """All pairs that the generator can draw; ``native``: on PyTorch's own kernels, too."""
    playable = {name: possible(recipe.carries()) for name, recipe in (stateful or {}).items()}
    playable |= {name: _playable(recipe) for name, recipe in recipes.items()}
    of_schedules = {
        (("recipe", name), ("schedule", feature))
        for name, features in playable.items()
        for feature in features
    }
    eager = (EAGER.name, EAGER_NATIVE.name) if native else (EAGER.name,)
    taken = [name for rung in rungs for name in (eager if rung == "none" else (rung,))]
    return _of_models(recipes, taken) | of_schedules


def _playable(recipe: Recipe) -> frozenset[str]:
    """Features that a model's events may have under this recipe; an infinity is the data's."""
    lacking = {"inf"} | (set() if recipe.autocasts else {"inside autocast"})
    return frozenset(of_models.FEATURES) - lacking


def _of_models(recipes: Mapping[str, Recipe], rungs: list[str]) -> frozenset[Pair]:
    if not recipes:
        return frozenset()
    values: dict[str, list[str]] = {
        "recipe": list(recipes),
        "model": list(get_args(ModelName)),
        "rung": rungs,
        "checkpoint": list(get_args(Checkpoint)),
        "dtype": sorted({d for r in recipes.values() for d in _dtypes(r)}),
        "data": [*EXACT, *WILD],
    }
    found = (
        ((one, a), (two, b))
        for one, two in combinations(DIMENSIONS, 2)
        for a in values[one]
        for b in values[two]
    )
    return frozenset(pair for pair in found if _possible(pair, recipes))


def _dtypes(recipe: Recipe) -> list[str]:
    return [*recipe.dtypes, *(["fp32+autocast"] if recipe.autocasts else [])]


def _possible(pair: Pair, recipes: Mapping[str, Recipe]) -> bool:
    chosen = dict(pair)
    if "recipe" in chosen and "dtype" in chosen:
        return chosen["dtype"] in _dtypes(recipes[chosen["recipe"]])
    if chosen.get("data") in EXACT:  # one linear, run once
        return chosen.get("model", "linear") == "linear" and chosen.get("dtype") != "fp32+autocast"
    if chosen.get("checkpoint") == "reentrant":
        autocast = chosen.get("dtype") == "fp32+autocast"
        return not not_reentrant(chosen.get("model", ""), autocast=autocast)
    return True


def table(seen: Collection[Pair], whole: Collection[Pair]) -> list[tuple[str, int, int]]:
    """(dimension x dimension, pairs seen, pairs there are), and their sum last."""
    rows = []
    for one, two in (*combinations(DIMENSIONS, 2), ("recipe", "schedule")):
        there = [p for p in whole if (p[0][0], p[1][0]) == (one, two)]
        if there:
            rows.append((f"{one} x {two}", sum(p in seen for p in there), len(there)))
    return [*rows, ("all", sum(r[1] for r in rows), sum(r[2] for r in rows))]


def missing(seen: Collection[Pair], whole: Iterable[Pair]) -> list[str]:
    """The pairs nobody has run, as text."""
    return sorted(f"{a[1]} x {b[1]}" for a, b in whole if (a, b) not in seen)
