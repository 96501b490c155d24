"""The public record of a planted fault. No dependency beyond the standard library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A planted bug.

    ``plant`` returns a context manager; it is entered around converting, compiling and running the
    arms under test, never around the reference. ``recipes`` are globs of the recipes it can hit.
    """

    id: str
    family: str
    title: str
    link: str
    recipes: tuple[str, ...]
    plant: Callable[[], AbstractContextManager[object]]
    #: Only a compiled rung can show it: it is hunted longer and counted apart.
    compiled: bool = False
    #: What it is hunted on; "": on what the score is for.
    device: str = ""
    #: False: it is hunted on sizes that are multiples of what the recipe takes.
    wild_shapes: bool = True

    def __post_init__(self) -> None:
        if not self.id or not self.recipes:
            raise ValueError(f"fault {self.id!r} needs an id and at least one recipe glob")
