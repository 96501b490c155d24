"""Builds the rows of models that consist of a single operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from narrowfuzz.models.model import Arguments, Model


def operator_model(
    name: str,
    title: str,
    module: str,
    arguments: Callable[[Any], Arguments],
    *operators: str,
    smaller: tuple[str, ...] = (),
    fixed: Mapping[str, Any] = {},
    **more: Any,
) -> Model:
    """A model of a single operator. ``operators`` are the names of all that are observed when it
    runs, such as those of its forward and its backward."""
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
    """True if the installed package ``of`` has this file. (To import it would take seconds.)"""
    found = find_spec(of)
    return found is not None and (Path(str(found.origin)).parent / file).is_file()
