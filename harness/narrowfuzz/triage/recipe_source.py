"""What of a recipe's own file a script is made of: how it converts, what its tap sees."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from narrowfuzz.case import Spec
from narrowfuzz.recipe import Recipe
from narrowfuzz.triage.paste import Source, pasted

#: Functions of a recipe -> how a script calls them, whose name there is ``of``'s default.
_CALLED = {
    "convert": "convert = lambda model, of={name}: of(model, None)",
    "tap": "tap = {name}",
    "converted": "converted = {name}",
    "convertible": "convertible = lambda m, of={name}: of(m, None)",
}


def recipe_source(recipe: Recipe, spec: Spec, *names: str) -> str:
    """Source that defines these of convert(model), tap(emit), converted(m) and convertible(m), with
    the Spec put in. Raises ValueError for one that is no function of a file."""
    parts = []
    for name in names:
        function, keywords = _function(recipe, name)
        constants = _of_spec(recipe, spec) | {k: repr(v) for k, v in keywords.items()}
        parts.append(pasted((function.__name__,), list(_sources(function)), constants))
        parts.append(_CALLED[name].format(name=function.__name__))
    return "\n".join(parts)


def _function(recipe: Recipe, name: str) -> tuple[Any, dict[str, Any]]:
    """The function, and what a partial of it puts in."""
    given: Any = getattr(recipe, name)
    keywords: dict[str, Any] = {}
    if isinstance(given, partial):
        given, keywords = given.func, given.keywords
    function = inspect.unwrap(given)
    closed = getattr(function, "__closure__", None)
    if closed or not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise ValueError(
            f"{recipe.name}: a script is made of the source of {name}, so it must be a function "
            "of the recipe's file, or functools.partial of one with keywords"
        )
    return function, keywords


def _of_spec(recipe: Recipe, spec: Spec) -> dict[str, str]:
    fields = {f.name: getattr(spec, f.name) for f in msgspec.structs.fields(spec)}
    fields |= {"backend": recipe.backend(spec), "tokens": spec.tokens}
    plain = {k: v for k, v in fields.items() if isinstance(v, str | int | bool)}
    return {f"spec.{name}": repr(value) for name, value in plain.items()}


def _sources(function: Any) -> Iterator[Source]:
    """Its file, and the files of ours that it imports from."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("narrowfuzz."):
            yield importlib.import_module(node.module or "")
    yield Path(function.__code__.co_filename)
