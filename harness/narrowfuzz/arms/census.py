"""The census: what a conversion did to a model besides quantising the GEMMs it should quantise."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from narrowfuzz.arms.frames import raised_by
from narrowfuzz.arms.model_snapshot import HOOKS, STATE_DICT_HOOKS, Snapshot, TensorRecord, snapshot
from narrowfuzz.case.spec import Spec
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.trace.trace import Census, Change, ChangeKind

#: Forwards that a quantised linear replaces legitimately; any other is a subclass's own.
PLAIN_FORWARDS = frozenset({"torch.nn.modules.linear.Linear.forward"})
#: Changes that are consequences of a subclass losing its own forward.
_FOLLOWS: frozenset[ChangeKind] = frozenset(
    {"module missing", "parameter missing", "buffer missing", "attributes lost"}
)
_QUANTISED = "a quantised layer"


#: Errors by which code shows that it is wrong: no refusal is one of these.
_MISTAKES = (ImportError, NameError, AttributeError, TypeError)


class RecipeError(ValueError):
    """The code of a recipe raised, not the library that it converts by: nothing can be judged."""


def convert(recipe: Recipe, model: nn.Module, spec: Spec) -> tuple[Any, Census | None]:
    """``model`` converted by the recipe, and the census of it; None if the recipe does not define
    which modules it converts. Raises RecipeError as ``converted_by`` does."""
    if recipe.converted is None:
        with torch.no_grad():
            return converted_by(recipe, model, spec), None
    converted = recipe.converted
    with _mistakes_of(recipe, "convertible"):
        before = snapshot(model, lambda module, name: recipe.convertible(module, name, spec))
    with torch.no_grad():
        model = converted_by(recipe, model, spec)
    with _mistakes_of(recipe, "converted"):
        after = snapshot(model, lambda module, name: converted(module))
    changes = compare(before, after, recipe.may_change)
    return model, Census(tuple(sorted(after.chosen)), changes)


def converted_by(recipe: Recipe, model: nn.Module, spec: Spec) -> Any:
    """``model`` converted by the recipe. Raises RecipeError if the recipe's own code is wrong, or
    returns no module."""
    with _mistakes_of(recipe, "convert"):
        converted = recipe.convert(model, spec)
    if not isinstance(converted, nn.Module):
        raise RecipeError(
            f"recipe {recipe.name!r}: convert returned {type(converted).__name__}: it must return "
            "the converted model"
        )
    return converted


@contextmanager
def _mistakes_of(recipe: Recipe, function: str) -> Iterator[None]:
    """Raises RecipeError for an error by which this function of the recipe is wrong itself."""
    try:
        yield
    except _MISTAKES as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = _file_of(getattr(recipe, function))
        if not raised_by(own, frames):
            raise
        line = max(f.lineno or 0 for f in frames if f.filename == own)
        raise RecipeError(
            f"recipe {recipe.name!r}: {function} raised {type(error).__name__}: {error} "
            f"({own}:{line}): correct the recipe, or install what it imports (a library of your "
            "own: set PYTHONPATH)"
        ) from error


def _file_of(function: Any) -> str:
    """The file that defines a function, or the function that a partial or a decorator wraps."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return code.co_filename if code else ""


def compare(
    before: Snapshot, after: Snapshot, may_change: frozenset[ChangeKind]
) -> tuple[Change, ...]:
    """Every difference that was not requested of the conversion.

    ``before.chosen`` are the modules that should be converted, ``after.chosen`` those that were:
    at these, the kinds of changes in ``may_change`` are allowed.
    """
    differences = (
        *_coverage(before, after),
        *_modules(before, after),
        *_parameters(before, after),
        *_buffers(before, after),
        *_state_dict(before, after),
    )
    bare = {change.module for change in differences if change.kind == "own forward lost"}
    return tuple(
        replace(change, swapped=not _one_with(change, before).isdisjoint(after.chosen))
        for change in differences
        if not (change.kind in may_change and change.module in after.chosen)
        and not (change.kind in _FOLLOWS and change.module in bare)
    )


def _one_with(change: Change, before: Snapshot) -> set[str]:
    """The module of a change and, where it concerns something shared, the modules that shared it
    first."""
    together = {change.module}
    if change.kind == "second name left unconverted":
        together.add(before.modules[change.module].first)
    if change.kind == "tied weights untied":
        mine = (p.first for name, p in before.parameters.items() if owner(name) == change.module)
        together |= set(map(owner, mine))
    return together


def owner(name: str) -> str:
    """The module a parameter's, buffer's or child's name belongs to."""
    return name.rpartition(".")[0]


def _coverage(before: Snapshot, after: Snapshot) -> Iterator[Change]:
    for name in before.modules:
        if name in before.chosen and name in after.modules and name not in after.chosen:
            # a module used under two names may be converted under one of them only
            second = before.modules[name].first in after.chosen
            yield Change(
                "second name left unconverted" if second else "left unconverted",
                name,
                _QUANTISED,
                after.modules[name].type,
            )
    for name in after.modules:
        if name in after.chosen - before.chosen and name in before.modules:
            yield Change("converted unasked", name, before.modules[name].type, _QUANTISED)


def _modules(before: Snapshot, after: Snapshot) -> Iterator[Change]:
    for name in after.modules:
        if name not in before.modules and owner(name) in before.modules:
            yield Change("module added", owner(name), after=name)
    for name, old in before.modules.items():
        new = after.modules.get(name)
        if new is None:
            if owner(name) in after.modules:  # else the loss of its parent is reported already
                yield Change("module missing", owner(name), name)
            continue
        if old.type != new.type:
            yield Change("module type changed", name, old.type, new.type)
        if old.forward != new.forward:
            plain = old.forward in PLAIN_FORWARDS
            yield Change(
                "forward changed" if plain else "own forward lost", name, old.forward, new.forward
            )
        if old.training != new.training:
            yield Change(
                "training flag changed",
                name,
                f"training={old.training}",
                f"training={new.training}",
                attributes=("training",),
            )
        lost = [kind.strip("_") for kind in HOOKS if new.hooks[kind] < old.hooks[kind]]
        if lost:
            yield Change("hooks lost", name, ", ".join(lost))
        gone = [a for a in old.attributes if a not in new.attributes]
        if gone:
            yield Change("attributes lost", name, ", ".join(gone), attributes=tuple(gone))
        for attribute, value in old.attributes.items():
            if new.attributes.get(attribute, value) != value:
                yield Change(
                    "attributes changed",
                    name,
                    f"{attribute}={value}",
                    f"{attribute}={new.attributes[attribute]}",
                )
        # a name that was left out entirely is not also split
        skipped = name in before.chosen and name not in after.chosen
        if not skipped and old.first in after.modules:
            together = after.modules[old.first].first == new.first
            if old.first != name and not together:
                yield Change(
                    "shared module split", name, f"the same object as {old.first}", "another"
                )


def _parameters(before: Snapshot, after: Snapshot) -> Iterator[Change]:
    yield from _presence(before.parameters, after.parameters, before, after, "parameter")
    common = {n: p for n, p in before.parameters.items() if n in after.parameters}
    for name, old in common.items():
        new, module = after.parameters[name], owner(name)
        were = old.first != name and old.first in common
        if were and after.parameters[old.first].first != new.first:
            yield Change("tied weights untied", module, f"{name} is {old.first}", "two parameters")
        if new.first != name and new.first in common and old.first == name:
            yield Change("weights tied", module, "two parameters", f"{name} is {new.first}")
        for kind, x, y in (
            ("parameter type changed", old.type, new.type),
            ("parameter shape changed", old.shape, new.shape),
            ("parameter dtype changed", old.dtype, new.dtype),
            ("parameter device changed", old.device, new.device),
            ("requires_grad changed", old.requires_grad, new.requires_grad),
        ):
            if x != y:
                yield Change(kind, module, f"{name}: {x}", f"{y}")  # type: ignore[arg-type]
        if new.hooks < old.hooks:
            yield Change("parameter hooks lost", module, f"{name}: {old.hooks}", f"{new.hooks}")
        if old.attributes - new.attributes:
            gone = tuple(sorted(old.attributes - new.attributes))
            yield Change(
                "parameter attributes lost",
                module,
                f"{name}: {', '.join(gone)}",
                parameter=name,
                attributes=gone,
            )
    order = [name for name in after.parameters if name in common]
    if order != list(common):
        moved = next(n for n, m in zip(order, common, strict=True) if n != m)
        yield Change("parameter order changed", owner(moved), after=moved)


def _buffers(before: Snapshot, after: Snapshot) -> Iterator[Change]:
    yield from _presence(before.buffers, after.buffers, before, after, "buffer")
    for name, old in before.buffers.items():
        new = after.buffers.get(name)
        if new is not None and (old.shape, old.dtype, old.device) != (
            new.shape,
            new.dtype,
            new.device,
        ):
            yield Change("buffer changed", owner(name), name)


def _presence(
    old: dict[str, TensorRecord],
    new: dict[str, TensorRecord],
    before: Snapshot,
    after: Snapshot,
    what: str,
) -> Iterator[Change]:
    """Parameters or buffers that were lost or added in modules that exist before and after."""
    for name in old:
        if name not in new and owner(name) in after.modules:
            yield Change(f"{what} missing", owner(name), name)  # type: ignore[arg-type]
    for name in new:
        if name not in old and owner(name) in before.modules:
            yield Change(f"{what} added", owner(name), after=name)  # type: ignore[arg-type]


def _state_dict(before: Snapshot, after: Snapshot) -> Iterator[Change]:
    if before.state_dict is None or after.state_dict is None:
        return
    for name, old in before.modules.items():
        new = after.modules.get(name)
        if new and any(new.hooks[kind] < old.hooks[kind] for kind in STATE_DICT_HOOKS):
            return  # the lost hook explains the keys
    explained = _tensors(before) ^ _tensors(after)
    for key in before.state_dict:
        if key not in after.state_dict and key not in explained:
            yield Change("state_dict keys changed", owner(key), key)
    for key in after.state_dict:
        if key not in before.state_dict and key not in explained:
            yield Change("state_dict keys changed", owner(key), after=key)


def _tensors(model: Snapshot) -> set[str]:
    return {*model.parameters, *model.buffers}
