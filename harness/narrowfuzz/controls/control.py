"""The public record of a clean control. No dependency beyond the standard library and cases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.case import ModelName


@dataclass(frozen=True)
class Control:
    """A subject on which every finding is a false alarm.

    ``plant`` returns a context manager; it is entered around converting, compiling and running the
    arms under test, as a fault's is, but what it changes is legal: ``why`` says by which rule.
    """

    id: str
    title: str
    #: The rule or the documentation that makes it legal, and where it stands.
    why: str
    #: Globs of the recipes it runs on.
    recipes: tuple[str, ...]
    #: Models besides the linear; none: all. With nothing but "linear", that one only.
    models: tuple[ModelName, ...] = ()
    #: Globs of the rungs it climbs; none: all.
    arms: tuple[str, ...] = ()
    plant: Callable[[], AbstractContextManager[object]] = nullcontext
    #: What it runs on; "": on what is asked for.
    device: str = ""
    #: False: sizes are multiples of what the recipe takes.
    wild_shapes: bool = True
    #: Files that define recipes besides the shipped ones.
    recipe_files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not self.id or not self.why or not self.recipes:
            raise ValueError(
                f"control {self.id!r} needs an id, the rule that makes it legal, and at least one "
                "recipe glob"
            )
