"""``Fault`` and ``Control`` of version 0.1.0, for users' files that still call them; ``Plant`` has
replaced both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from narrowfuzz.case.spec import ModelName
from narrowfuzz.plants.plant import Plant


def Fault(
    id: str,
    family: str,
    title: str,
    link: str,
    recipes: tuple[str, ...],
    plant: Callable[[], AbstractContextManager[object]],
    compiled: bool = False,
    device: str = "",
    wild_shapes: bool = True,
) -> Plant:
    """A planted bug: a ``Plant`` without ``legal``."""
    return Plant(
        id,
        family,
        title,
        link,
        recipes,
        plant,
        compiled=compiled,
        device=device,
        wild_shapes=wild_shapes,
    )


def Control(
    id: str,
    title: str,
    why: str,
    recipes: tuple[str, ...],
    models: tuple[ModelName, ...] = (),
    arms: tuple[str, ...] = (),
    plant: Callable[[], AbstractContextManager[object]] = nullcontext,
    device: str = "",
    wild_shapes: bool = True,
    recipe_files: tuple[Path, ...] = (),
) -> Plant:
    """A subject on which every finding is a false alarm: a legal ``Plant``, of family "control" as
    0.1.0 had no families for these."""
    return Plant(
        id,
        "control",
        title,
        why,
        recipes,
        plant,
        legal=True,
        models=models,
        arms=arms,
        device=device,
        wild_shapes=wild_shapes,
        recipe_files=recipe_files,
    )
