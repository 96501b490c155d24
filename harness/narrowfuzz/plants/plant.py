"""``Plant``, the public record of a planted fault or legal rewrite. It needs only the standard
library and ``narrowfuzz.case``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.case.spec import ModelName


@dataclass(frozen=True)
class Plant:
    """A planted bug or, with ``legal``, a subject on which every finding is a false alarm.

    ``plant`` returns a context manager. It is entered around the conversion, compilation and run
    of the arms under test, never around the reference.
    """

    id: str
    family: str
    #: The change that it makes, in one sentence.
    title: str
    #: For a fault, the bug report that it copies; for a legal plant, the rule or documentation that
    #: makes it legal, and where to find that.
    source: str
    #: Globs of the recipes that it can affect.
    recipes: tuple[str, ...]
    plant: Callable[[], AbstractContextManager[object]] = nullcontext
    legal: bool = False
    #: What a case must contain to show it, besides one of the recipes: "a model", "attention".
    #: Text for listings only.
    needs: str = ""
    #: Only a compiled arm can show it: the search takes longer and is counted separately.
    compiled: bool = False
    #: The models to draw; empty: all. Single linears are drawn if this is empty or has "linear".
    models: tuple[ModelName, ...] = ()
    #: Globs of the arms to run; empty: all that the user selected.
    arms: tuple[str, ...] = ()
    #: The device to run on; "": the one that the user selected.
    device: str = ""
    #: Whether sizes that are no multiple of the recipe's blocks, and empty ones, are drawn as well.
    wild_shapes: bool = True
    #: Files that define recipes in addition to the built-in ones.
    recipe_files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not self.id or not self.recipes or (self.legal and not self.source):
            raise ValueError(
                f"plant {self.id!r} needs an id, at least one recipe glob and, if it is legal, the "
                "rule that makes it so as its source"
            )
