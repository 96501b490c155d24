"""Takes source from a recipe's own file for a script: conversion, tap, and verbs of its subject."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from narrowfuzz.case.events import Settings
from narrowfuzz.case.spec import Spec, fields_of
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.triage.script.paste import Source, pasted

#: Function of a recipe -> the line that defines it in a script. There the recipe's own function,
#: called ``name`` in its file, is the default of ``of``.
_CALLED = {
    "convert": "convert = lambda model, of={name}: of(model, None)",
    "tap": "tap = {name}",
    "converted": "converted = {name}",
    "convertible": "convertible = lambda m, n, of={name}: of(m, n, None)",
}

#: The functions of a subject that the player of a library's layers and its checks may call.
VERBS = (
    "enter",
    "layer",
    "autocast",
    "checkpoint",
    "backward",
    "state",
    "pending",
    "reset",
    "listen",
    "load",
)


def recipe_source(recipe: Recipe, spec: Spec, *names: str) -> str:
    """Source that defines those of convert(model), tap(emit), converted(m) and convertible(m, n)
    that ``names`` lists, with the Spec put in. Raises ValueError for one that is not a plain
    function at the top of a file."""
    parts = []
    for name in names:
        function, keywords = _function(recipe.name, name, getattr(recipe, name))
        parts.append(_source(recipe.name, [function], _of_spec(recipe, spec) | keywords))
        parts.append(_CALLED[name].format(name=function.__name__))
    return "\n".join(parts)


def conversion_of(recipe: Recipe, spec: Spec) -> str:
    """Source that converts a model of the Spec, for a reader. "" if nothing is converted, or if
    ``convert`` is not a plain function at the top of a file."""
    try:
        function, keywords = _function(recipe.name, "convert", recipe.convert)
        source = _source(recipe.name, [function], _of_spec(recipe, spec) | keywords)
    except ValueError:
        return ""
    return source if "import " in source else ""


def verbs_source(
    recipe: Recipe,
    device: str,
    spec: Spec | None,
    settings: Settings | None,
    names: Sequence[str],
) -> str:
    """Source of these verbs of the recipe's subject under their functions' own names, with the Spec
    and the settings put in; None for those that differ between runs. Raises ValueError as
    ``recipe_source``."""
    subject, functions = recipe.subject(device), []
    constants = {} if settings is None else _plain_fields("settings", settings)
    if spec is not None:
        constants |= _plain_fields("spec", spec) | {"spec.layer": repr(spec.layer)}
    for name in names:
        function, keywords = _function(recipe.name, name, getattr(subject, name))
        functions.append(function)
        constants |= keywords
    return _source(recipe.name, functions, constants)


def verb_names(recipe: Recipe, device: str) -> dict[str, str]:
    """Verb of the recipe's subject -> the name of its function."""
    subject = recipe.subject(device)
    given = {name: getattr(subject, name) for name in VERBS}
    return {n: _function(recipe.name, n, verb)[0].__name__ for n, verb in given.items() if verb}


def _source(named: str, functions: Sequence[Any], constants: dict[str, str]) -> str:
    sources = dict.fromkeys(source for function in functions for source in _sources(function))
    try:
        return pasted([function.__name__ for function in functions], list(sources), constants)
    except KeyError as error:
        raise ValueError(f"{named}: {error} is not defined at its file's top") from None


def _function(owner: str, name: str, given: Any) -> tuple[Any, dict[str, str]]:
    """The function, and the source text of the keyword arguments that a partial of it gives.
    Raises ValueError if a script cannot be made of its source."""
    keywords: dict[str, Any] = {}
    positional: tuple[Any, ...] = ()
    if isinstance(given, functools.partial):
        given, keywords, positional = given.func, given.keywords, given.args
    function = inspect.unwrap(given)
    if getattr(function, "__closure__", None) or not _is_plain(function):
        raise _refused(owner, name)
    taken = inspect.signature(function).parameters
    only = all(k in taken and taken[k].kind is taken[k].KEYWORD_ONLY for k in keywords)
    if positional or not only or not all(map(_is_literal, keywords.values())):
        raise _refused(owner, name)
    return function, {k: repr(v) for k, v in keywords.items()}


def _is_plain(function: Any) -> bool:
    return inspect.isfunction(function) and function.__qualname__ == function.__name__ != "<lambda>"


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _refused(owner: str, name: str) -> ValueError:
    return ValueError(
        f"{owner}: a script is made of the source of {name}, so it must be a function of the "
        "recipe's file, or functools.partial of one with keyword-only arguments that are literals"
    )


def _of_spec(recipe: Recipe, spec: Spec) -> dict[str, str]:
    computed = {"spec.backend": repr(_backend(recipe, spec)), "spec.tokens": repr(spec.tokens)}
    return _plain_fields("spec", spec) | _plain_fields("spec.sharding", spec.sharding) | computed


def _plain_fields(name: str, fields: msgspec.Struct) -> dict[str, str]:
    """Expression that reads a field -> source text of its value, for the fields of a record that
    are text, numbers or flags."""
    given = {f.name: getattr(fields, f.name) for f in fields_of(type(fields))}
    plain = {k: v for k, v in given.items() if isinstance(v, str | int | bool)}
    return {f"{name}.{field}": repr(value) for field, value in plain.items()}


def _backend(recipe: Recipe, spec: Spec) -> str:
    """The Spec's backend. If it names none, the recipe's default, which is found as the backend
    with the same plan."""
    if spec.backend:
        return recipe.backend(spec)
    plan = recipe.plan(spec)
    named = (msgspec.structs.replace(spec, backend=name) for name in recipe.backends)
    return next((s.backend for s in named if recipe.plan(s) == plan), recipe.backends[0])


@functools.lru_cache(maxsize=64)
def _sources(function: Any) -> tuple[Source, ...]:
    """The sources that a function needs: modules of ours that it imports from in its body, its own
    file, and files beside it that this file imports from."""
    ours = [
        importlib.import_module(node.module)
        for node in _imports(textwrap.dedent(inspect.getsource(function)))
        if node.module and node.module.startswith("narrowfuzz.")
    ]
    file = Path(function.__code__.co_filename)
    beside = [  # other files of a recipe that is a folder
        file.with_name(f"{node.module}.py")
        for node in _imports(file.read_text())
        if node.module and node.level == 1
    ]
    return (*ours, file, *beside)


def _imports(text: str) -> Iterator[ast.ImportFrom]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
