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
        try:
            parts.append(pasted((function.__name__,), list(_sources(function)), constants))
        except KeyError as error:
            raise ValueError(f"{recipe.name}: {error} is not defined at its file's top") from None
        parts.append(_CALLED[name].format(name=function.__name__))
    return "\n".join(parts)


def _function(recipe: Recipe, name: str) -> tuple[Any, dict[str, Any]]:
    """The function, and what a partial of it puts in."""
    given: Any = getattr(recipe, name)
    keywords: dict[str, Any] = {}
    positional: tuple[Any, ...] = ()
    if isinstance(given, partial):
        given, keywords, positional = given.func, given.keywords, given.args
    function = inspect.unwrap(given)
    if getattr(function, "__closure__", None) or not _is_plain(function):
        raise _refused(recipe, name)
    taken = inspect.signature(function).parameters
    only = all(k in taken and taken[k].kind is taken[k].KEYWORD_ONLY for k in keywords)
    if positional or not only or not all(map(_is_literal, keywords.values())):
        raise _refused(recipe, name)
    return function, keywords


def _is_plain(function: Any) -> bool:
    return inspect.isfunction(function) and function.__qualname__ == function.__name__ != "<lambda>"


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _refused(recipe: Recipe, name: str) -> ValueError:
    return ValueError(
        f"{recipe.name}: a script is made of the source of {name}, so it must be a function of the "
        "recipe's file, or functools.partial of one with keyword-only arguments that are literals"
    )


def _of_spec(recipe: Recipe, spec: Spec) -> dict[str, str]:
    fields = {f.name: getattr(spec, f.name) for f in msgspec.structs.fields(spec)}
    fields |= {"backend": _backend(recipe, spec), "tokens": spec.tokens}
    plain = {k: v for k, v in fields.items() if isinstance(v, str | int | bool)}
    return {f"spec.{name}": repr(value) for name, value in plain.items()}


def _backend(recipe: Recipe, spec: Spec) -> str:
    """The Spec's, or the one that the recipe takes where it names none: the one with its plan."""
    if spec.backend:
        return recipe.backend(spec)
    plan = recipe.plan(spec)
    named = (msgspec.structs.replace(spec, backend=name) for name in recipe.backends)
    return next((s.backend for s in named if recipe.plan(s) == plan), recipe.backends[0])


def _sources(function: Any) -> Iterator[Source]:
    """Its file, and the files of ours that it imports from."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("narrowfuzz."):
            yield importlib.import_module(node.module or "")
    yield Path(function.__code__.co_filename)
