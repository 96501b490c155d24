"""A row of a model that is nothing but one operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from narrowfuzz.models.model import Arguments, Model


def alone(
    name: str,
    title: str,
    module: str,
    arguments: Callable[[Any], Arguments],
    *operators: str,
    smaller: tuple[str, ...] = (),
    fixed: Mapping[str, Any] = {},
    **more: Any,
) -> Model:
    """What is seen of it may be several operators, as of its forward and its backward."""
    return Model(
        name,
        title,
        module,
        arguments,
        "operator",
        smaller=smaller,
        operators=frozenset(operators),
        fixed={"bias": False, "attention": "flash", **fixed},
        **more,
    )


def has(file: str, of: str = "torch") -> bool:
    """Has the installed package a file of this name? To import it takes seconds."""
    found = find_spec(of)
    return found is not None and (Path(str(found.origin)).parent / file).is_file()
