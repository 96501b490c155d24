"""A recipe: its plan, how the real library converts a model, and how its GEMMs are recorded.

Recipe files are content, loaded by path: the shipped ``recipes/``, a user's ``--recipe-file``, or
an entry point of group ``narrowfuzz.recipes`` that names a file. A file defines ``RECIPES``.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib.metadata
import importlib.util
import inspect
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import Requirement
from packaging.version import Version

from narrowfuzz.case.sharding import Shards
from narrowfuzz.case.spec import Dtype, Spec, TensorName
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.recipe.content import content_dir, load_definitions
from narrowfuzz.recipe.deprecated import refused_arguments
from narrowfuzz.recipe.mistakes import mistake_in
from narrowfuzz.recipe.source import (
    CONVERTED,
    LIBRARY,
    Source,
    no_conversion,
    no_plan,
    split_by_source,
)
from narrowfuzz.recipe.stateful import Subject, no_subject
from narrowfuzz.trace.trace import ChangeKind

T = TypeVar("T")


@dataclass(frozen=True)
class Emit:
    """The function that a recipe's tap calls with the operands of every GEMM, in the order in which
    they run."""

    take: Callable[..., None]
    #: Returns False while nothing is recorded.
    wanted: Callable[[], bool] = lambda: True

    def __call__(
        self, a: Any, a_scale: Any, b: Any, b_scale: Any, a_amax: Any = None, b_amax: Any = None
    ) -> None:
        """Record a GEMM: codes [rows, C] of both operands and their scales, as live tensors, and
        max|x| in the scale's shape where the library exposes it. A two-level scale is a pair: the
        blocks' scales and the tensor's."""
        if self.wanted():
            self.take(a, a_scale, b, b_scale, a_amax, b_amax)


def no_tap(emit: Emit) -> AbstractContextManager[None]:
    """The tap of recipes that quantise nothing: their operands are the layer's own tensors."""
    return nullcontext()


#: Changes that every conversion to quantised GEMMs may make, but only at modules that it converts.
MAY_CHANGE: frozenset[ChangeKind] = frozenset(
    {"module type changed", "forward changed", "parameter type changed"}
)


def converts_nothing(module: Any) -> bool:
    """``converted`` for recipes that convert nothing: no module runs quantised GEMMs."""
    return False


def promises_nothing(module: Any, name: str, spec: Spec) -> bool:
    """``convertible`` for recipes that convert nothing: no module will be converted."""
    return False


def never(spec: Spec, device: str) -> str:
    """``refusal`` for recipes that promise to run everything."""
    return ""


def nothing() -> None:
    """``provide`` and ``prepare`` for recipes that need neither."""


def every_linear(module: Any, name: str, spec: Spec, *, only: tuple[str, ...] = ()) -> bool:
    """``convertible`` for libraries that document no exception: nn.Linear and its subclasses, as
    far as the user's filter ``only`` selects them."""
    from torch import nn

    return isinstance(module, nn.Linear) and named(name, only)


def named(name: str, globs: tuple[str, ...]) -> bool:
    """Do these globs select a layer of this dotted name? They match the whole name or its last
    part. A glob that begins with ! excludes layers; if there are only such globs, all other layers
    are selected. Users' names do not have the prefix "model." of the module that holds the
    model."""
    from fnmatch import fnmatchcase

    names = (name, name.removeprefix("model."), name.rpartition(".")[2])
    inside = [glob for glob in globs if not glob.startswith("!")]
    outside = [glob[1:] for glob in globs if glob.startswith("!")]
    wanted = not inside or any(fnmatchcase(n, glob) for n in names for glob in inside)
    return wanted and not any(fnmatchcase(n, glob) for n in names for glob in outside)


#: The tensors that F.linear rounds under autocast, on every device; and those that a layer rounds
#: to which autocast does not apply: none.
ROUNDED: frozenset[TensorName] = frozenset({"input", "weight", "bias"})
NOT_ROUNDED: frozenset[TensorName] = frozenset()


def everywhere(backend: str, device: str) -> str:
    """``unavailable`` for recipes that run wherever their package does."""
    return ""


@dataclass(frozen=True)
class Recipe:
    """One way to train in low precision: how a library converts a model, and what it promises.

    A recipe must provide its ``name``, ``family`` and ``title``; and either ``plan`` and
    ``convert``, or, for a library's own layers, ``subject`` and ``carries``. All other fields have
    defaults:

    * what it needs: ``backends``, ``package``, ``unavailable``, ``provide``, ``prepare``,
      ``process``
    * what is observed: ``tap``, ``inverse_scales``, ``converted``, ``convertible``, ``may_change``
    * what it promises: ``refusal``, ``batch_invariant``
    * what it is tried with: ``alignment``, ``multiples``, ``dtypes``, ``autocast``, ``shards``,
      ``models_of``, ``eager``, ``leaves_out``
    * what findings and scripts say: ``functional``, ``based_on``, ``backend_words``,
      ``environment``

    Fields may be given by position, so a new one comes last.
    """

    name: str
    #: The family in fingerprints: recipes of one family share them.
    family: str
    title: str
    #: The first one is the default.
    backends: tuple[str, ...] = ("",)
    #: The distribution that the recipe needs besides torch, with the releases whose names and rules
    #: it knows, as a pip requirement; "" for none.
    package: str = ""
    plan: Callable[[Spec], Plan] = no_plan
    #: Converts a model with the real library. Called inside a planted fault. Scripts contain the
    #: source of this function and of ``tap``, ``converted`` and ``convertible``, so these must be
    #: functions of a file, or partials of one with literal keywords, and must use nothing of
    #: narrowfuzz except by import.
    convert: Callable[[Any, Spec], Any] = no_conversion
    #: (Spec, device) -> why the library may refuse the Spec there, as the rule that a clear message
    #: should state; "" if the library promises to run it.
    refusal: Callable[[Spec, str], str] = never
    #: A context that reports every quantised GEMM of an eager run to an Emit.
    tap: Callable[[Emit], AbstractContextManager[None]] = no_tap
    #: True: the scales that ``tap`` reports are 1/s, as scaled-GEMM kernels take them, of a plan
    #: that says s; not with ``Fp32InverseScale``, which is what data is divided by.
    inverse_scales: bool = False
    #: Does this module run quantised GEMMs after conversion? None: no census is taken.
    converted: Callable[[Any], bool] | None = None
    #: Will this module of this dotted name be converted? Called before the conversion. It states
    #: the library's documented rule and the user's filter; other modules are judged as unquantised.
    convertible: Callable[[Any, str, Spec], bool] = promises_nothing
    #: The kinds of changes that are allowed at a converted module.
    may_change: frozenset[ChangeKind] = MAY_CHANGE
    #: (backend, device) -> why this machine cannot run the backend, "" if it can.
    unavailable: Callable[[str, str], str] = everywhere
    #: Drawn dimensions are often multiples of this.
    alignment: int = 16
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32")
    #: Device -> the tensors that a linear rounds to bf16 under autocast before it uses them; its
    #: results are bf16 in any case. None: the recipe is not run under autocast.
    autocast: Callable[[str], frozenset[TensorName]] | None = None
    #: True: a function is under test, and the layer around it is ours.
    functional: bool = False
    #: The shipped recipe from which it differs only by a filter or by settings: that recipe's known
    #: issues apply to this one, too. "" for none.
    based_on: str = ""
    #: The ways in which it can run on ranks; "codes": ranks may communicate codes, with one scale
    #: for a tensor. (): it is not run on ranks.
    shards: tuple[Shards, ...] = ()
    #: The package whose own models it runs; "": models of no package.
    models_of: str = ""
    #: Backends that are not compiled and run in one process only.
    eager: tuple[str, ...] = ()
    #: Backend -> its description, which findings show.
    backend_words: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Environment variables that its scripts set before torch is imported.
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Values of a Spec's fields that this recipe does not support, as "field=value" -> why not.
    leaves_out: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: The kind of process in which it runs: recipes that patch a library need one of their own.
    process: str = ""
    #: Called once before processes start, to fetch what the recipe needs; raises ValueError if that
    #: fails.
    provide: Callable[[], None] = nothing
    #: Called once in each process.
    prepare: Callable[[], None] = nothing
    #: Device, as torch calls it -> the library's own layers; used instead of a plan and a
    #: conversion. ``carries`` returns which models and events these layers support.
    subject: Callable[[str], Subject] = no_subject
    carries: Callable[[], Carries] = Carries
    #: Backends whose library promises that a row of a linear has the same bits in any batch.
    batch_invariant: tuple[str, ...] = ()
    #: Backend -> the value that replaces ``alignment`` for it.
    multiples: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if missing := self.source.missing(self):
            raise ValueError(
                f"recipe {self.name!r} needs {missing}, or subject and carries if it brings a "
                "library's own layers"
            )
        for name in self.batch_invariant:
            if name not in self.backends:
                raise ValueError(
                    f"recipe {self.name!r}: batch_invariant: "
                    + unknown("backend", name, self.backends, of=self.name)
                )

    @property
    def source(self) -> Source:
        """Whether the recipe converts a model or provides a library's own layers."""
        return CONVERTED if self.subject is no_subject else LIBRARY

    @property
    def autocasts(self) -> bool:
        """True if the recipe is run under autocast, which needs an fp32 model to narrow."""
        return self.autocast is not None and "fp32" in self.dtypes

    @property
    def filtered(self) -> tuple[str, ...]:
        """Names of its functions that take a filter of linears (keyword ``only``); none if it does
        not support filters."""
        taking = [
            verb
            for verb in ("convert", "convertible", "refusal")
            if "only" in inspect.signature(getattr(self, verb)).parameters
        ]
        return tuple(taking) if {"convert", "convertible"} <= {*taking} else ()

    def backend(self, spec: Spec) -> str:
        """The Spec's backend, checked. Raises ValueError with the nearest match."""
        name = spec.backend or self.backends[0]
        if name not in self.backends:
            raise ValueError(unknown("backend", name, self.backends, of=self.name))
        return name

    def models(self, named: Collection[str]) -> tuple[str, ...]:
        """Names of the models that it runs, among ``named``, or among all if none is named."""
        return self.source.models(self, named)

    def takes(self, model: str) -> bool:
        """Does it run this model? A user's model: always. A package's model: only if the recipe is
        for that package; such a recipe runs none of our other models. A model that is one operator
        of torch only if the recipe quantises nothing."""
        row = MODELS.get(model)
        if row is None or row.own:
            return True
        if row.kind == "operator" and not row.package and not unconverted(self):
            return False
        return row.package == self.models_of

    @property
    def compiles(self) -> bool:
        """Does it have a backend that can be compiled?"""
        return not set(self.backends) <= set(self.eager)

    def check(self, spec: Spec) -> None:
        """Raises ValueError naming what in the Spec this recipe does not support, and why."""
        self.source.check(self, spec)


#: The most names that the sentence of ``unknown`` lists.
_NAMED = 10


def unknown(kind: str, name: str, known: Iterable[str], *, of: str = "") -> str:
    """The error message for a name that does not exist, with the nearest match."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known[:_NAMED])}{more}"
    return f"unknown {kind} {name!r}{f' of {of}' if of else ''}: {hint}"


def load_every(extra_files: Sequence[Path] = (), names: Iterable[str] = ()) -> dict[str, Recipe]:
    """All recipes by name, and the filtered ones among ``names`` ("recipe@globs"). Each file is
    executed once. Raises ValueError naming a file that cannot be loaded, or for a filter of a
    recipe that supports none."""
    shipped = {r.name: r for file in _files() for r in _load_file(file)}
    found = shipped | {r.name: r for file in extra_files for r in _load_file(file, tried=True)}
    return found | {name: _filtered(found, name) for name in names if FILTERED in name}


#: Separates a recipe's name and globs of the linears that it converts: "name@feed_forward.*,!wo".
FILTERED = "@"


def in_short(name: str) -> str:
    """A recipe's name in a sentence, without the globs of its filter."""
    base, filtered, _ = name.partition(FILTERED)
    return base + " (filtered)" * bool(filtered)


def _filtered(recipes: Mapping[str, Recipe], name: str) -> Recipe:
    base, _, globs = name.partition(FILTERED)
    if base not in recipes:
        raise ValueError(unknown("recipe", base, recipes))
    recipe = recipes[base]
    if not recipe.filtered:
        raise ValueError(f"{base} takes no filter: its convert has no keyword `only`")
    return with_filter(recipe, globs)


def with_filter(recipe: Recipe, globs: str) -> Recipe:
    """The recipe restricted to the linears that these comma-separated globs select (``named``)."""
    only = tuple(globs.split(","))
    functions: dict[str, Any] = {
        verb: partial(getattr(recipe, verb), only=only) for verb in recipe.filtered
    }
    name = f"{recipe.name}{FILTERED}{globs}"
    return replace(recipe, name=name, based_on=recipe.based_on or recipe.name, **functions)


#: Recipes that do not convert anything.
UNCONVERTED = ("torch.fp32", "torch.bf16", "torch.fp16")


def unconverted(recipe: Recipe) -> bool:
    """Does the recipe quantise nothing, so that every operator is torch's own?"""
    spec = Spec(recipe=recipe.name, dtype=recipe.dtypes[0])
    return not (recipe.models_of or recipe.plan(spec).quantised)


def load_recipes(extra_files: Sequence[Path] = (), names: Iterable[str] = ()) -> dict[str, Recipe]:
    """All recipes that convert a model, by name. Raises ValueError as ``load_every``."""
    models, _ = split_by_source(load_every(extra_files, names).values())
    return {recipe.name: recipe for recipe in models}


def _files() -> list[Path]:
    shipped = sorted(content_dir("recipes").iterdir())
    files = [path for path in shipped if path.suffix == ".py" or _is_folder(path)]
    for entry in importlib.metadata.entry_points(group="narrowfuzz.recipes"):
        files.append(Path(str(entry.load())))
    return files


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith((".", "_"))


def _load_file(file: Path, *, tried: bool = False) -> Sequence[Recipe]:
    """``tried``: also look for mistakes in plans, which takes time for those that are shipped."""
    recipes: list[Recipe] = load_definitions(file, "recipe", "RECIPES", (Recipe,))
    for recipe in recipes:
        if wrong := refused_arguments(recipe) or (tried and mistake_in(recipe)):
            raise ValueError(f"recipe file {file}: {recipe.name}: {wrong}")
    return recipes


def lacks(recipe: Recipe) -> str:
    """Why the package that this recipe needs is missing, or is of a release that the recipe does
    not know; "" if neither holds."""
    if not recipe.package:
        return ""
    needed = Requirement(recipe.package)
    if importlib.util.find_spec(needed.name) is None:
        return f"needs {needed}: pip install {shlex.quote(str(needed))}"
    try:
        here = importlib.metadata.version(needed.name)
    except importlib.metadata.PackageNotFoundError:
        return ""  # a checkout on the path, which has no version
    old = not needed.specifier.contains(here, prereleases=True)
    return f"needs {needed}, and {here} is installed" if old else ""


def installed(package: str, otherwise: str) -> Version:
    """The installed release of a package, on which a recipe's plans and names depend; ``otherwise``
    if the package is missing, or is a checkout without a version."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Version(otherwise)


def obstacles(recipe: Recipe, device: str) -> dict[str, str]:
    """Each backend that cannot run here, with the reason."""
    if reason := lacks(recipe):
        return dict.fromkeys(recipe.backends, reason)
    reasons = {backend: recipe.unavailable(backend, device) for backend in recipe.backends}
    return {backend: reason for backend, reason in reasons.items() if reason}


def runnable(recipe: Recipe, device: str) -> Recipe | None:
    """The recipe with only the backends that run here; None if none does."""
    lacking = obstacles(recipe, device)
    backends = tuple(b for b in recipe.backends if b not in lacking)
    return replace(recipe, backends=backends) if backends else None


def obstacle(recipe: Recipe, device: str) -> str:
    """Why no backend of the recipe can run here, "" if one can. Calls ``provide``."""
    if runnable(recipe, device) is None:
        return "; ".join(obstacles(recipe, device).values())
    try:
        recipe.provide()
    except ValueError as error:
        return str(error)
    return ""


def processes(recipes: Iterable[Recipe]) -> list[str]:
    """The kinds of process that these recipes need."""
    return sorted({recipe.process for recipe in recipes})


def select(recipes: Mapping[str, T], globs: Iterable[str]) -> dict[str, T]:
    """The recipes matching any glob (all if none is given). Raises ValueError for a glob that
    matches nothing."""
    chosen: dict[str, T] = {}
    for glob in globs:
        hits = [glob] if glob in recipes else fnmatch.filter(recipes, glob)
        if not hits:
            raise ValueError(unknown("recipe", glob, recipes))
        chosen.update({name: recipes[name] for name in hits})
    return chosen or dict(recipes)
