"""Pairwise coverage: which recipe has run with which model, rung, checkpoint, dtype and data class.

Most bugs of this field need a combination of two features, so a campaign counts pairs. The universe
contains only pairs that the generator can draw; those of them that have not been run are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import get_args

from narrowfuzz.case import features as of_training
from narrowfuzz.case.arm import EAGER, EAGER_NATIVE, SHARDED, Compile
from narrowfuzz.case.layout import layouts
from narrowfuzz.case.sharding import UNSHARDED, Sharding
from narrowfuzz.case.spec import Case, Checkpoint, DataSpec, Spec
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.draw.stimulus import possible
from narrowfuzz.draw.strategies import EXACT, OF_OPERATORS, WILD
from narrowfuzz.models.catalog import COMPOSED, of_kind
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.recipe.source import split_by_source

#: (dimension, value).
Feature = tuple[str, str]
Pair = tuple[Feature, Feature]

DIMENSIONS = ("recipe", "model", "rung", "checkpoint", "dtype", "data")


def features(case: Case) -> tuple[Feature, ...]:
    """The value of this case in each dimension."""
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
    """The rung that a Spec is counted for: that of ranks if it is sharded, else its ``compile``; if
    eager, PyTorch's own kernels if they run, else eager."""
    if spec.sharded:
        return SHARDED.name
    if spec.compile != "none":
        return spec.compile
    return (EAGER if spec.kernels == "default" else EAGER_NATIVE).name


def pairs(case: Case) -> tuple[Pair, ...]:
    """Every pair of features of this case; features of its training are paired only with its
    recipe."""
    recipe = ("recipe", case.spec.recipe)
    met = tuple((recipe, ("schedule", name)) for name in sorted(of_training.features(case.spec)))
    return (*combinations(features(case), 2), *met)


#: Fields of a Spec that a layout on ranks is paired with.
_BESIDE_LAYOUT = (
    "recipe",
    "model",
    "dtype",
    "compile",
    "checkpoint",
    "steps",
    "microbatches",
    "optimizer",
    "loss_scaling",
    "clipping",
)


def layout_pairs(spec: Spec) -> frozenset[Pair]:
    """Every pair of options of a Spec on ranks: of its layout, and of what it trains there; none
    for a Spec in one process."""
    layout, names = spec.sharding, Sharding.__struct_fields__
    if layout == UNSHARDED:
        return frozenset()
    options = [(name, str(getattr(layout, name))) for name in names]
    options += [(name, str(getattr(spec, name))) for name in _BESIDE_LAYOUT]
    return frozenset(combinations(options, 2))


def universe(
    recipes: Mapping[str, Recipe],
    rungs: Collection[Compile],
    *,
    native: bool = False,
    sharded: bool = False,
    models: Sequence[str] = COMPOSED,
) -> frozenset[Pair]:
    """All pairs that the generator can draw with these models; ``native``: also on PyTorch's own
    kernels; ``sharded``: also on ranks."""
    converting, stateful = split_by_source(recipes.values())
    playable = {recipe.name: _playable(recipe) for recipe in converting}
    playable |= {recipe.name: possible(recipe.carries()) for recipe in stateful}
    happening = frozenset(
        (("recipe", name), ("schedule", feature))
        for name, able in playable.items()
        for feature in able
    )
    eager = (EAGER.name, EAGER_NATIVE.name) if native else (EAGER.name,)
    taken = [name for rung in rungs for name in (eager if rung == "none" else (rung,))]
    taken += [SHARDED.name] if sharded else []
    found = _of_converted({recipe.name: recipe for recipe in converting}, taken, models)
    return happening.union(found, *map(_of_library, stateful))


def _playable(recipe: Recipe) -> frozenset[str]:
    """Features that the training of a converted model may have under this recipe. An infinity in
    one step is drawn only with loss scaling, which does not work with gradients in fp16."""
    scaled = set(recipe.dtypes) != {"fp16"}
    lacking = (set() if scaled else {"inf"}) | (
        set() if recipe.autocasts else of_training.OF_AUTOCAST
    )
    return of_training.OF_CONVERTED - lacking


def _of_library(recipe: Recipe) -> frozenset[Pair]:
    """Pairs of a library's own layers, which run in eager on gaussian values."""
    carries = recipe.carries()
    values: dict[str, Sequence[str]] = {
        "recipe": [recipe.name],
        "model": [f"library_{layer}" for layer in carries.layers],
        "rung": [EAGER.name],
        "checkpoint": ["none", *carries.checkpoints],
        "dtype": list(recipe.dtypes),
        "data": [DataSpec().values],
    }
    return frozenset(_pairs(values))


def _pairs(values: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    """Every pair of values of two different dimensions."""
    return (
        ((one, a), (two, b))
        for one, two in combinations(DIMENSIONS, 2)
        for a in values[one]
        for b in values[two]
    )


def _of_converted(
    recipes: Mapping[str, Recipe], rungs: list[str], models: Sequence[str]
) -> frozenset[Pair]:
    if not recipes:
        return frozenset()
    values: dict[str, Sequence[str]] = {
        "recipe": list(recipes),
        "model": models,
        "rung": rungs,
        "checkpoint": list(get_args(Checkpoint)),
        "dtype": sorted({d for r in recipes.values() for d in _dtypes(r)}),
        "data": [*EXACT, *dict.fromkeys(OF_OPERATORS)],
    }
    return frozenset(pair for pair in _pairs(values) if _possible(pair, recipes))


def _dtypes(recipe: Recipe) -> list[str]:
    return [*recipe.dtypes, *(["fp32+autocast"] if recipe.autocasts else [])]


def _possible(pair: Pair, recipes: Mapping[str, Recipe]) -> bool:
    chosen = dict(pair)
    if chosen.get("rung") == SHARDED.name and not _on_ranks(chosen, recipes):
        return False
    if "recipe" in chosen and "dtype" in chosen:
        return chosen["dtype"] in _dtypes(recipes[chosen["recipe"]])
    single_operator = chosen.get("model", "") in of_kind("operator")
    if chosen.get("data", WILD[0]) not in (*EXACT, *WILD) and not single_operator:
        return False
    if chosen.get("data") in EXACT:  # one linear, run once
        return chosen.get("model", "linear") == "linear" and chosen.get("dtype") != "fp32+autocast"
    if chosen.get("checkpoint") == "reentrant":
        autocast = chosen.get("dtype") == "fp32+autocast"
        return not not_reentrant(chosen.get("model", ""), autocast=autocast)
    return True


def _on_ranks(chosen: Mapping[str, str], recipes: Mapping[str, Recipe]) -> bool:
    """True if the other feature of a pair with the rung of ranks can be drawn on ranks."""
    shards = recipes[chosen["recipe"]].shards if "recipe" in chosen else ("fsdp",)
    if chosen.get("dtype", "bf16") not in ("bf16", "fp32") or chosen.get("data") == "ladder":
        return False
    return bool(layouts(chosen.get("model", "linear"), shards))


def table(seen: Collection[Pair], whole: Collection[Pair]) -> list[tuple[str, int, int]]:
    """Rows of (dimension x dimension, pairs seen, pairs in the universe); the last is their sum."""
    rows = []
    for one, two in (*combinations(DIMENSIONS, 2), ("recipe", "schedule")):
        there = [p for p in whole if (p[0][0], p[1][0]) == (one, two)]
        if there:
            rows.append((f"{one} x {two}", sum(p in seen for p in there), len(there)))
    return [*rows, ("all", sum(r[1] for r in rows), sum(r[2] for r in rows))]


def missing(seen: Collection[Pair], whole: Iterable[Pair]) -> list[str]:
    """The pairs that have not been run, as text."""
    return sorted(f"{a[1]} x {b[1]}" for a, b in whole if (a, b) not in seen)
