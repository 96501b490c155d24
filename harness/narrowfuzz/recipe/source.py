"""The two kinds of recipes: those that convert a model, and those that provide a library's layers.

``Recipe.source`` returns the kind: a recipe with a ``subject`` provides layers. Code that must
treat the two kinds differently has a table with a row for each, or uses a field of Source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from narrowfuzz.case.event_rules import check_schedule
from narrowfuzz.case.layout import check_sharding
from narrowfuzz.case.spec import Spec
from narrowfuzz.case.trainings import check_events
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.recipe.carries import check_carried

if TYPE_CHECKING:
    from narrowfuzz.recipe.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Source:
    """One kind of recipe."""

    title: str
    #: (recipe, names) -> those of the named models, or of all models, that the recipe runs.
    models: Callable[[Recipe, Collection[str]], tuple[str, ...]]
    #: Raises ValueError naming what in a Spec a recipe does not support, and why.
    check: Callable[[Recipe, Spec], None]
    #: Fields of Recipe that must be set -> their default value, which counts as not set.
    needs: Mapping[str, Any] = field(default_factory=dict)

    def missing(self, recipe: Recipe) -> str:
        """The fields that the recipe must set and has not, in words."""
        left_out = (name for name, empty in self.needs.items() if getattr(recipe, name) is empty)
        return " and ".join(left_out)


def no_plan(spec: Spec) -> Plan:
    """``plan`` for recipes of a library's own layers, which have a Policy instead."""
    raise ValueError(f"{spec.recipe} runs a library's own layers: it has no plan")


def no_conversion(model: Any, spec: Spec) -> Any:
    """``convert`` for recipes of a library's own layers, which are created ready to use."""
    raise AssertionError("a library's own layers are not converted")


def _of_the_catalog(recipe: Recipe, named: Collection[str]) -> tuple[str, ...]:
    some = named or [name for name, model in MODELS.items() if not model.own]
    return tuple(name for name in some if recipe.takes(name))


def _of_the_library(recipe: Recipe, named: Collection[str]) -> tuple[str, ...]:
    return () if named else tuple(f"library_{layer}" for layer in recipe.carries().layers)


def _check_converted(recipe: Recipe, spec: Spec) -> None:
    if recipe.backend(spec) in recipe.eager and spec.sharded:
        raise ValueError(f"the backend {spec.backend!r} of {recipe.name} runs in one process")
    check_events(spec, autocasts=recipe.autocasts)
    check_sharding(spec, recipe.shards)


def _check_library(recipe: Recipe, spec: Spec) -> None:
    check_carried(spec, recipe.carries())
    check_schedule(spec)


CONVERTED = Source(
    "converts a model",
    _of_the_catalog,
    _check_converted,
    {"plan": no_plan, "convert": no_conversion},
)
#: The library's layers keep scaling state between events, and are judged event by event.
LIBRARY = Source("brings a library's own layers", _of_the_library, _check_library)


def split_by_source(recipes: Iterable[Recipe]) -> tuple[list[Recipe], list[Recipe]]:
    """The recipes that convert models, and those that provide a library's own layers."""
    of: dict[Source, list[Recipe]] = {CONVERTED: [], LIBRARY: []}
    for recipe in recipes:
        of[recipe.source].append(recipe)
    return of[CONVERTED], of[LIBRARY]
