"""What many tests ask of: recipes, and a ledger for models in which nothing else is wrong."""

from __future__ import annotations

from functools import cache

from narrowfuzz.ledger.ledger import Ledger, load_entries
from narrowfuzz.operators import DEVIATIONS
from narrowfuzz.recipe.recipe import Recipe, load_every
from narrowfuzz.recipe.source import split_by_source


def of_operators() -> Ledger:
    """What is known of torch's own operators, and nothing else: a right model shows it, too."""
    return Ledger([entry for entry in load_entries() if entry.deviation in DEVIATIONS])


@cache
def every_recipe() -> dict[str, Recipe]:
    """The shipped ones, read once."""
    return load_every()


@cache
def recipes() -> dict[str, Recipe]:
    """Those that convert a model, and patch no library for the rest of the process."""
    converted, _ = split_by_source(every_recipe().values())
    return {recipe.name: recipe for recipe in converted if not recipe.process}
