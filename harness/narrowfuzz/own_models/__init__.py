"""A user's own model: found, tried once, and registered as one of the models by name.

Its name in a case is made of its file, its function and a hash of the file. A case never executes a
file: only a user does, who names it on the command line or passes it to ``cases``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Model
from narrowfuzz.own_models.dims import choices, combinations, size
from narrowfuzz.own_models.source import Source, like, module_of, raised, source_of
from narrowfuzz.trace.words import few

__all__ = ["known_as", "register", "source_of"]
#: Largest number of functions that an error message lists if the requested one does not exist.
_NAMED = 6


@cache
def register(text: str) -> tuple[Model, ...]:
    """The model by this name, with the default arguments of ``build`` first and then with other
    values of its parameters. Each is tried once and added to ``MODELS``.

    Raises ValueError, in one sentence, for a model that cannot be judged: a build that raises or
    returns no module, a model without a linear, one that does not run on a CPU, or one whose runs
    differ (``trial.tried``).
    """
    source = source_of(text)
    values = _choices(source)
    sources = [replace(source, dims=dims) for dims in combinations(values)]
    sizes = {one.name: size(values, one.dims) for one in sources}
    models = tuple(_model(one, sizes) for one in sources)
    MODELS.update((model.name, model) for model in models)
    return models


def _choices(source: Source) -> dict[str, tuple[Any, ...]]:
    from narrowfuzz.play.own import imported

    try:
        module = imported(source.where)
    except (Exception, SystemExit) as error:
        raise source.refused(raised("importing it", error) + _in_package(error, source)) from error
    build = getattr(module, source.build, None)
    if not callable(build):
        raise source.refused(f"there is no function {source.build} in it{_others(module, source)}")
    try:
        return choices(build)
    except ValueError as error:
        raise source.refused(f"{source.build} {error}") from None


def _in_package(error: BaseException, source: Source) -> str:
    """End of a sentence that says how to name a file that imports its neighbours in a package."""
    relative = isinstance(error, ImportError) and "relative import" in str(error)
    if not (relative and source.where.endswith(".py")):
        return ""
    name = module_of(Path(source.where)) or "package.module"
    return f"; name it as part of its package: {name}:{source.build}"


def _others(module: Any, source: Source) -> str:
    """End of a sentence that lists the public functions defined in a module, and suggests one with
    a similar name."""
    there = [
        name
        for name, one in vars(module).items()
        if inspect.isfunction(one) and one.__module__ == module.__name__ and name[0] != "_"
    ]
    if not there:
        return ", nor any other"
    near = like(source.build, there)
    return (f"{near} Its" if near else "; its") + f" functions are {few(there, _NAMED)}"


def _model(source: Source, sizes: Mapping[str, float]) -> Model:
    from narrowfuzz.own_models.trial import tried  # imports torch

    mine = sizes[source.name]
    smaller = tuple(name for name in sorted(sizes, key=sizes.__getitem__) if sizes[name] < mine)
    return replace(tried(source), smaller=smaller)


def known_as(name: str, text: str) -> Model:
    """Register the model of a saved case under its name there, though the file may have changed
    since: the model is that of the file as it is now.

    Raises ValueError if ``name`` is of another file or function, or of arguments that ``build``
    does not have.
    """
    called = name.partition("#")[0]
    for model in register(text):
        if model.name.partition("#")[0] == called:
            MODELS[name] = model
            return model
    raise ValueError(f"the case is about the model {called}, not about {text}")
