"""A recipe: the plan, how to build it with the real library, and where its GEMM sites are.

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

from narrowfuzz.case.spec import Dtype, Shards, Spec, TensorName
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.recipe.content import content_dir, load_definitions
from narrowfuzz.recipe.deprecated import refused_arguments
from narrowfuzz.recipe.source import CONVERTED, LIBRARY, Source, no_conversion, no_plan, parted
from narrowfuzz.recipe.stateful import Subject, no_subject
from narrowfuzz.trace.trace import ChangeKind

T = TypeVar("T")


@dataclass(frozen=True)
class Emit:
    """What a recipe's tap calls with both operands of every GEMM, in the order they run."""

    take: Callable[..., None]
    #: False while nobody looks.
    wanted: Callable[[], bool] = lambda: True

    def __call__(
        self, a: Any, a_scale: Any, b: Any, b_scale: Any, a_amax: Any = None, b_amax: Any = None
    ) -> None:
        """Codes [rows, C] of both operands and their scales, live; max|x| in the scale's shape
        where the library tells it. A two-level scale is a pair: of blocks, and of the tensor."""
        if self.wanted():
            self.take(a, a_scale, b, b_scale, a_amax, b_amax)


def no_tap(emit: Emit) -> AbstractContextManager[None]:
    """For recipes that quantise nothing: the operands are the graph's inputs."""
    return nullcontext()


#: What a conversion to quantised GEMMs is for. At a module it converts, and nowhere else.
MAY_CHANGE: frozenset[ChangeKind] = frozenset(
    {"module type changed", "forward changed", "parameter type changed"}
)


def converts_nothing(module: Any) -> bool:
    """For recipes that convert nothing: no module runs quantised GEMMs."""
    return False


def promises_nothing(module: Any, name: str, spec: Spec) -> bool:
    """For recipes that convert nothing: no module will."""
    return False


def never(spec: Spec, device: str) -> str:
    """For recipes that promise to run everything."""
    return ""


def nothing() -> None:
    """For recipes that need nothing to be made ready."""


def every_linear(module: Any, name: str, spec: Spec, *, only: tuple[str, ...] = ()) -> bool:
    """nn.Linear and its subclasses: what a library that documents no exception converts."""
    from torch import nn

    return isinstance(module, nn.Linear) and named(name, only)


def named(name: str, globs: tuple[str, ...]) -> bool:
    """Is a layer of this dotted name, or its last part, among these globs? One that begins with !
    leaves layers out; all are in where no other glob is. A user's names lack the "model." of what
    holds the model."""
    from fnmatch import fnmatchcase

    names = (name, name.removeprefix("model."), name.rpartition(".")[2])
    inside = [glob for glob in globs if not glob.startswith("!")]
    outside = [glob[1:] for glob in globs if glob.startswith("!")]
    wanted = not inside or any(fnmatchcase(n, glob) for n in names for glob in inside)
    return wanted and not any(fnmatchcase(n, glob) for n in names for glob in outside)


#: What F.linear rounds under autocast, wherever it runs; what a layer does that autocast passes by.
ROUNDED: frozenset[TensorName] = frozenset({"input", "weight", "bias"})
NOT_ROUNDED: frozenset[TensorName] = frozenset()


def everywhere(backend: str, device: str) -> str:
    """For recipes that run wherever their package does."""
    return ""


@dataclass(frozen=True)
class Recipe:
    """One thing under test."""

    name: str
    #: Findings of one family share fingerprints.
    family: str
    title: str
    #: First one is the default.
    backends: tuple[str, ...] = ("",)
    #: Distribution the recipe needs besides torch, and the releases whose names and rules it knows,
    #: as pip writes them; "" for none.
    package: str = ""
    plan: Callable[[Spec], Plan] = no_plan
    #: Convert a model with the real library. Called inside a planted fault. Scripts are made of the
    #: source of this, ``tap``, ``converted`` and ``convertible``: functions of a file, or partials
    #: of one with keywords that are literals, and nothing of narrowfuzz's in them but imports.
    convert: Callable[[Any, Spec], Any] = no_conversion
    #: (Spec, device) -> why the library may refuse it there, as the rule a clear message should
    #: state; "" if it promises to run it.
    refusal: Callable[[Spec, str], str] = never
    #: Watch every quantised GEMM of an eager run.
    tap: Callable[[Emit], AbstractContextManager[None]] = no_tap
    #: True: the scales that it shows are 1/s, as scaled-GEMM kernels take them.
    inverse_scales: bool = False
    #: Does this module, after conversion, run quantised GEMMs? None: no census is taken.
    converted: Callable[[Any], bool] | None = None
    #: Will conversion convert this module of this dotted name, as it is before? The library's
    #: documented rule, and the user's own filter. What it leaves alone is judged unquantised.
    convertible: Callable[[Any, str, Spec], bool] = promises_nothing
    #: What may differ at a converted module.
    may_change: frozenset[ChangeKind] = MAY_CHANGE
    #: (backend, device) -> why this machine cannot run it, "" if it can.
    unavailable: Callable[[str, str], str] = everywhere
    #: Dimensions worth drawing multiples of.
    alignment: int = 16
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32")
    #: Device -> the tensors that a linear rounds to bf16 under autocast before it uses them; its
    #: results are bf16 in any case. None: it is not drawn under autocast.
    autocast: Callable[[str], frozenset[TensorName]] | None = None
    #: True: a function is under test, and the layer around it is ours.
    functional: bool = False
    #: The shipped recipe that it is but for its filter or settings: what is known of that one is
    #: known of this one.
    based_on: str = ""
    #: It is laid out over ranks by "fsdp" and "tensor" parallelism, which may communicate "codes"
    #: of one scale a tensor; (): it is not drawn on ranks.
    shards: tuple[Shards, ...] = ()
    #: The package whose own models it runs; "": it runs those of no package.
    models_of: str = ""
    #: Backends that no compiler sees, and no ranks.
    eager: tuple[str, ...] = ()
    #: Backend -> what it is, in words that a finding shows.
    backend_words: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Variables that its scripts set before torch is imported.
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Values of a Spec's fields that this recipe does not take, as "field=value", and why.
    leaves_out: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: The kind of process that it runs in, as recipes that patch a library need one of their own;
    #: what is called once before processes start, and once in each. ``provide`` fetches what is
    #: needed, and raises ValueError if it cannot.
    process: str = ""
    provide: Callable[[], None] = nothing
    prepare: Callable[[], None] = nothing
    #: The library's own layers on a device, as torch calls it, and what of a training they can
    #: play, in place of a plan and a conversion.
    subject: Callable[[str], Subject] = no_subject
    carries: Callable[[], Carries] = Carries
    #: Backends whose library promises that a row of a linear has the same bits in any batch.
    batch_invariant: tuple[str, ...] = ()
    #: Backend -> dimensions worth drawing multiples of, where they are others than ``alignment``.
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
        """Where the modules come from that it runs."""
        return CONVERTED if self.subject is no_subject else LIBRARY

    @property
    def autocasts(self) -> bool:
        """True where autocast is drawn: it narrows what is fp32."""
        return self.autocast is not None and "fp32" in self.dtypes

    @property
    def filtered(self) -> tuple[str, ...]:
        """Its functions that a filter of linears is put into; none if it takes no filter."""
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
        """Names of the models that it runs, of those that a user named, or of all."""
        return self.source.models(self, named)

    def takes(self, model: str) -> bool:
        """Does it run this model? A user's model: always. A package's: only if it is a recipe for
        that package's models, which runs no others of ours. A model that is one operator: only if
        it quantises nothing."""
        row = MODELS.get(model)
        if row is None or row.own:
            return True
        return row.package == self.models_of and (row.kind != "operator" or unconverted(self))

    @property
    def compiles(self) -> bool:
        """Has it a backend that a compiler sees?"""
        return not set(self.backends) <= set(self.eager)

    def check(self, spec: Spec) -> None:
        """Raises ValueError naming what of the Spec a model of its cannot play, and why."""
        self.source.check(self, spec)


#: Names that such a sentence has room for.
_NAMED = 10


def unknown(kind: str, name: str, known: Iterable[str], *, of: str = "") -> str:
    """The sentence for a name that does not exist, with the nearest match."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known[:_NAMED])}{more}"
    return f"unknown {kind} {name!r}{f' of {of}' if of else ''}: {hint}"


def load_every(extra_files: Sequence[Path] = (), names: Iterable[str] = ()) -> dict[str, Recipe]:
    """All recipes by name, and those of these names that have a filter; each file is executed once.
    Raises ValueError naming the file if one cannot be loaded, or for a filter nobody takes."""
    found = {r.name: r for file in _files(extra_files) for r in _load_file(file)}
    return found | {name: _filtered(found, name) for name in names if FILTERED in name}


#: Between a recipe's name and globs of the linears that it converts: "name@feed_forward.*,!wo".
FILTERED = "@"


def _filtered(recipes: Mapping[str, Recipe], name: str) -> Recipe:
    base, _, globs = name.partition(FILTERED)
    if base not in recipes:
        raise ValueError(unknown("recipe", base, recipes))
    recipe = recipes[base]
    if not recipe.filtered:
        raise ValueError(f"{base} takes no filter: its convert has no keyword `only`")
    return with_filter(recipe, globs)


def with_filter(recipe: Recipe, globs: str) -> Recipe:
    """The recipe that converts the linears of these globs, with commas between, as ``named``."""
    only = tuple(globs.split(","))
    functions: dict[str, Any] = {
        verb: partial(getattr(recipe, verb), only=only) for verb in recipe.filtered
    }
    name = f"{recipe.name}{FILTERED}{globs}"
    return replace(recipe, name=name, based_on=recipe.based_on or recipe.name, **functions)


#: Recipes that leave every operator as torch has it.
UNCONVERTED = ("torch.fp32", "torch.bf16", "torch.fp16")


def unconverted(recipe: Recipe) -> bool:
    """Does it leave a linear, and so any operator, as torch has it?"""
    spec = Spec(recipe=recipe.name, dtype=recipe.dtypes[0])
    return not (recipe.models_of or recipe.plan(spec).quantised)


def load_recipes(extra_files: Sequence[Path] = (), names: Iterable[str] = ()) -> dict[str, Recipe]:
    """All recipes that convert a model, by name. Raises ValueError as ``load_every``."""
    models, _ = parted(load_every(extra_files, names).values())
    return {recipe.name: recipe for recipe in models}


def _files(extra: Sequence[Path]) -> list[Path]:
    shipped = sorted(content_dir("recipes").iterdir())
    files = [path for path in shipped if path.suffix == ".py" or _is_folder(path)]
    for entry in importlib.metadata.entry_points(group="narrowfuzz.recipes"):
        files.append(Path(str(entry.load())))
    return [*files, *extra]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith((".", "_"))


def _load_file(file: Path) -> Sequence[Recipe]:
    recipes: list[Recipe] = load_definitions(file, "recipe", "RECIPES", (Recipe,))
    for recipe in recipes:
        if wrong := refused_arguments(recipe):
            raise ValueError(f"recipe file {file}: {recipe.name}: {wrong}")
    return recipes


def lacks(recipe: Recipe) -> str:
    """Why what this recipe needs is not installed here, or not in a release whose names and rules
    it knows; "" if it is."""
    if not recipe.package:
        return ""
    needed = Requirement(recipe.package)
    if importlib.util.find_spec(needed.name) is None:
        return f"needs {needed}: pip install {shlex.quote(str(needed))}"
    try:
        here = importlib.metadata.version(needed.name)
    except importlib.metadata.PackageNotFoundError:
        return ""  # a checkout on the path, of no release
    old = not needed.specifier.contains(here, prereleases=True)
    return f"needs {needed}, and {here} is installed" if old else ""


def installed(package: str, otherwise: str) -> Version:
    """The release of a package that is here, whose plans and names a recipe takes; ``otherwise``
    where none is, or a checkout of no release."""
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
    """The recipe with the backends that run here only; None if none does."""
    lacking = obstacles(recipe, device)
    backends = tuple(b for b in recipe.backends if b not in lacking)
    return replace(recipe, backends=backends) if backends else None


def obstacle(recipe: Recipe, device: str) -> str:
    """Why none of it can run here, "" if some can; what it needs is fetched now."""
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
    """The recipes matching any glob (all if none is given). Raises ValueError for one that matches
    nothing."""
    chosen: dict[str, T] = {}
    for glob in globs:
        hits = [glob] if glob in recipes else fnmatch.filter(recipes, glob)
        if not hits:
            raise ValueError(unknown("recipe", glob, recipes))
        chosen.update({name: recipes[name] for name in hits})
    return chosen or dict(recipes)
