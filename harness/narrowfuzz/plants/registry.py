"""Look up plants: the list ``PLANTS`` of every module of this package, or of a user's file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from narrowfuzz.plants.plant import Plant
from narrowfuzz.recipe.content import load_definitions
from narrowfuzz.recipe.recipe import unknown


def builtin_plants() -> dict[str, Plant]:
    """All built-in plants by id."""
    modules = [m.name for m in iter_modules([str(Path(__file__).parent)]) if m.name != "__main__"]
    found = [
        plant
        for name in modules
        for plant in getattr(import_module(f"narrowfuzz.plants.{name}"), "PLANTS", ())
    ]
    by_id = {plant.id: plant for plant in found}
    assert len(by_id) == len(found), "two plants have one id"
    return by_id


def builtin_faults() -> dict[str, Plant]:
    """The built-in plants that the rules must find, by id."""
    return {id: plant for id, plant in builtin_plants().items() if not plant.legal}


def load_plants(file: Path) -> dict[str, Plant]:
    """Plants of a user's file, by id. Raises ValueError naming the file if it cannot be used."""
    found = load_definitions(file, "plant", "PLANTS", (Plant,))
    return {plant.id: plant for plant in found}


def find_plant(file: str, id: str) -> Plant:
    """The plant with this id in a user's file or, if ``file`` is "", among the built-in ones.
    Raises ValueError if there is none."""
    plants = load_plants(Path(file)) if file else builtin_plants()
    if id not in plants:
        raise ValueError(unknown("plant", id, plants))
    return plants[id]


@contextmanager
def planted(file: str, id: str) -> Iterator[None]:
    """A context in which the plant with this id is active, in this process and in the processes
    that run as ranks; an ``id`` of "" plants nothing. Raises ValueError like ``find_plant``."""
    if not id:
        yield
        return
    plant = find_plant(file, id)
    if all(glob.startswith("te.") for glob in plant.recipes):
        from te_on_cpu.environment import enter

        enter()  # makes TransformerEngine importable for the plant
    from narrowfuzz.play.processes import entered_by_ranks

    with entered_by_ranks(partial(planted, file, id)), plant.plant():
        yield


def identity(file: str, id: str) -> str:
    """A string that identifies the plant: caches of compiled artefacts are separate for each."""
    content = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return f"{content}:{id}"
