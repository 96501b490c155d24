"""Where the modules under test come from: a recipe converts a model, or brings layers of its own.

``Recipe.source`` says which, by whether ``Recipe.subject`` is given; code that must treat the two
differently has a row for each, or a field here.
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
    """What such recipes have in common."""

    title: str
    #: Names of the models that a recipe runs, of those that a user named, or of all.
    models: Callable[[Recipe, Collection[str]], tuple[str, ...]]
    #: Raises ValueError naming what of a Spec a recipe cannot play, and why.
    check: Callable[[Recipe, Spec], None]
    #: Fields that a recipe must fill, each with what it is while nobody has.
    needs: Mapping[str, Any] = field(default_factory=dict)

    def missing(self, recipe: Recipe) -> str:
        """The fields that it should have filled and has not."""
        left_out = (name for name, empty in self.needs.items() if getattr(recipe, name) is empty)
        return " and ".join(left_out)


def no_plan(spec: Spec) -> Plan:
    """For recipes of a library's own layers, whose rules are a policy."""
    raise ValueError(f"{spec.recipe} runs a library's own layers: it has no plan")


def no_conversion(model: Any, spec: Spec) -> Any:
    """For recipes of a library's own layers, which are made in its formats."""
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
#: Its layers keep a state between events, and are judged event by event.
LIBRARY = Source("brings a library's own layers", _of_the_library, _check_library)


def parted(recipes: Iterable[Recipe]) -> tuple[list[Recipe], list[Recipe]]:
    """Those that convert models, and those that bring a library's own layers."""
    of: dict[Source, list[Recipe]] = {CONVERTED: [], LIBRARY: []}
    for recipe in recipes:
        of[recipe.source].append(recipe)
    return of[CONVERTED], of[LIBRARY]
