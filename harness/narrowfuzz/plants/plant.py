"""The public record of what is planted. No dependency beyond the standard library and cases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.case.spec import ModelName


@dataclass(frozen=True)
class Plant:
    """A planted bug, or with ``legal`` a subject on which every finding is a false alarm.

    ``plant`` returns a context manager; it is entered around converting, compiling and running the
    arms under test, never around the reference.
    """

    id: str
    family: str
    #: What it does, in one sentence.
    title: str
    #: Of a fault the report that it copies; of what is legal the rule or the documentation that
    #: makes it so, and where it stands.
    source: str
    #: Globs of the recipes that it can hit.
    recipes: tuple[str, ...]
    plant: Callable[[], AbstractContextManager[object]] = nullcontext
    legal: bool = False
    #: What a case must have to show it, besides one of these recipes: "a model", "attention".
    needs: str = ""
    #: Only a compiled rung can show it: it is hunted longer and counted apart.
    compiled: bool = False
    #: Models besides the linear; none: all. With nothing but "linear", that one only.
    models: tuple[ModelName, ...] = ()
    #: Globs of the rungs that it is climbed on; none: all that are asked for.
    arms: tuple[str, ...] = ()
    #: What it runs on; "": on what is asked for.
    device: str = ""
    #: False: sizes are multiples of what the recipe takes.
    wild_shapes: bool = True
    #: Files that define recipes besides the shipped ones.
    recipe_files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not self.id or not self.recipes or (self.legal and not self.source):
            raise ValueError(
                f"plant {self.id!r} needs an id, at least one recipe glob and, if it is legal, the "
                "rule that makes it so as its source"
            )
