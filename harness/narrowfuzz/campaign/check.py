"""``narrowfuzz check``: judge a user's own model, first as it is trained, then in configurations
near that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec

from narrowfuzz.arms.available import select_arms
from narrowfuzz.campaign.campaign import consoles
from narrowfuzz.campaign.pace import LARGE, said_of_pace, seconds_of_cases
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.arm import Arm, Compile
from narrowfuzz.case.events import Backward, Forward, Reload, Step
from narrowfuzz.case.ladder import climb
from narrowfuzz.case.spec import Case, Checkpoint, DataSpec, Spec, ValueClass
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.draw.specs import fixed
from narrowfuzz.draw.strategies import WILD
from narrowfuzz.ledger.advice import of_models
from narrowfuzz.ledger.facts import Fact
from narrowfuzz.machine.device import torch_name
from narrowfuzz.machine.environment import prepare
from narrowfuzz.models.model import Model
from narrowfuzz.own_models import register
from narrowfuzz.recipe.recipe import (
    FILTERED,
    Recipe,
    load_recipes,
    named,
    runnable,
    select,
    unknown,
)
from narrowfuzz.trace.words import few, plural

#: A step, an evaluation in between, a reload, and another step.
_TRAINING = (
    Forward(),
    Backward(of=(0,)),
    Step(),
    Forward(mode="eval"),
    Reload(),
    Forward(),
    Backward(of=(2,)),
    Step(),
)
#: The kinds of data on which the user's configuration is judged first, from tame to wild.
_VALUES: tuple[ValueClass, ...] = (
    "gaussian",
    "outlier",
    "heavy_tail",
    "zero_rows",
    "binade_edges",
    "inf_nan",
)

#: Seconds that a compiler takes on an idle core with empty caches: a constant, and the increase for
#: each linear. Measured on tests/own_models with torchao.float8.rowwise.
_COMPILES = {"aot_eager": (3.0, 0.6), "inductor": (10.0, 3.0)}
#: Minutes that a check takes if --minutes is not given.
_MINUTES = 2.0
#: The share of a run's time that the first compilation may take without a warning.
_SHARE = 0.6
#: How many buffers or parameters a note names.
_NAMED = 6


@dataclass(frozen=True)
class _Configuration:
    """A user's model and the configuration in which it is trained."""

    options: RunOptions
    model: Model
    #: The same model, built with other values of the parameters of ``build``.
    others: Sequence[Model]
    compile: Compile
    checkpoint: Checkpoint
    #: Globs of the linears that the recipes convert, as ``recipe.named`` reads them.
    only: tuple[str, ...]
    #: Names of the requested recipes, and the recipes of them that run here.
    wanted: tuple[str, ...]
    recipes: Sequence[Recipe]

    @property
    def facts(self) -> dict[str, Fact]:
        """Facts about the requested configuration, for the ledger to rule out entries."""
        return {
            "dtype": self.model.fixed["dtype"],
            "checkpoint": self.checkpoint,
            "compile": self.compile,
            "memory_budget": 100,
            "grad_mode": "train",
            "autocast": False,
            "dynamic": False,
            **of_models((self.model, *self.others)),
        }


def check_command(
    options: RunOptions, compile: str, checkpoint: str, only: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    """Check ``options.models[0]``; returns the same as ``run_command``. ``only``: globs of the
    linears that the recipes convert. Raises ValueError for a model that cannot be judged, or an
    option value that does not exist."""
    device = torch_name(options.device or "cpu")
    one = _configuration(options, device, compile, checkpoint, only)
    asked_of, pace = _specs(one.model, one.recipes, one.compile, one.checkpoint), {}
    if one.model.multiplications > LARGE and device == "cpu":
        plain = _unfiltered(options, one.recipes, device)
        pace = seconds_of_cases(asked_of, one.model.multiplications, plain, device)
        asked_of.sort(key=pace.__getitem__)
    first = (*_first(asked_of), *_other_sizes(one.others, one.recipes))
    climbed = dict.fromkeys(arm.name for case in first for arm in climb(case.spec))
    chosen = select_arms(options.arms)
    arms = tuple(name for name in climbed if name in chosen)
    if not arms:
        raise ValueError(
            f"--arm {' '.join(options.arms)}: this configuration runs {', '.join(climbed)}; "
            "--compile and --checkpoint say more"
        )
    meant = dict.fromkeys(arm.name for spec in asked_of for arm in _meant(climb(spec)))
    _, around = consoles(options)
    around.print(_head(one, len(first), asked_of), markup=False)
    if pace:
        minutes = None if options.cases else options.minutes or _MINUTES
        around.print(said_of_pace(pace, len(first), minutes), markup=False)
    from narrowfuzz.campaign.main import run_command

    return run_command(
        replace(
            options,
            recipes=one.wanted,
            arms=arms,
            first=first,
            first_arms=() if options.arms else tuple(meant),
            linears=False,
            configuration=one.facts,
        )
    )


def _configuration(
    options: RunOptions, device: str, compile: str, checkpoint: str, only: tuple[str, ...]
) -> _Configuration:
    if compile not in get_args(Compile):
        raise ValueError(unknown("value", compile, get_args(Compile), of="--compile"))
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(unknown("value", checkpoint, get_args(Checkpoint), of="--checkpoint"))
    (text,) = options.models
    prepare(options.plant)
    (model, *others) = register(text)
    if checkpoint == "reentrant" and (why := not_reentrant(model.name, autocast=False)):
        raise ValueError(f"--checkpoint reentrant cannot recompute {model.title}: {why}")
    wanted = options.recipes or (f"torch.{model.fixed['dtype']}",)
    if only:
        wanted = _filtered(model, select(load_recipes(options.recipe_files), wanted), only)
    every = load_recipes(options.recipe_files, wanted)
    recipes = [here for r in select(every, wanted).values() if (here := runnable(r, device))]
    if not recipes:
        raise ValueError(
            f"none of {', '.join(wanted)} can run here: narrowfuzz list recipes says why"
        )
    _takes_parameters_of(model, recipes)
    return _Configuration(options, model, others, compile, checkpoint, only, wanted, recipes)  # type: ignore[arg-type]


def _unfiltered(options: RunOptions, recipes: Iterable[Recipe], device: str) -> dict[str, Recipe]:
    """The same recipes without a filter of linears, by name."""
    names = {recipe.name.partition(FILTERED)[0] for recipe in recipes}
    every = select(load_recipes(options.recipe_files), sorted(names))
    return {name: here for name, one in every.items() if (here := runnable(one, device))}


def _filtered(model: Model, recipes: Iterable[str], only: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the recipes with this filter. Raises ValueError if the filter leaves no linear,
    or if one of its globs matches none."""
    idle = [glob for glob in only if not any(named(n, (glob.lstrip("!"),)) for n in model.linears)]
    names = ", ".join(name.removeprefix("model.") for name in model.linears)
    linears = f"the linears of {model.title} are {names}"
    if idle:
        what = " and ".join(f"{glob.lstrip('!')!r} (of --filter {glob!r})" for glob in idle)
        raise ValueError(f"no linear is called {what}: {linears}")
    if not any(named(name, only) for name in model.linears):
        filters = " ".join(f"--filter {glob!r}" for glob in only)
        raise ValueError(f"{filters} leaves no linear to convert: {linears}")
    return tuple(f"{name}{FILTERED}{','.join(only)}" for name in recipes)


def _takes_parameters_of(model: Model, recipes: Iterable[Recipe]) -> None:
    """Raises ValueError for a recipe that does not take parameters of the model's dtype: the model
    is a user's, and is not cast."""
    dtype = model.fixed["dtype"]
    for recipe in recipes:
        if dtype not in recipe.dtypes:
            takes = " or ".join(recipe.dtypes)
            raise ValueError(
                f"{recipe.name} takes {takes} parameters, and those of {model.title} are {dtype}: "
                f"build it in {takes}, or name another recipe (torch.{dtype} leaves it as it is)"
            )


def _specs(
    model: Model, recipes: Sequence[Recipe], compile: Compile, checkpoint: Checkpoint
) -> list[Spec]:
    """The requested configuration as a Spec for each recipe and backend; if it is compiled, without
    the backends that run eagerly only."""
    return [
        fixed(
            Spec(
                recipe=recipe.name,
                backend=backend,
                model=model.name,
                compile=compile,
                checkpoint=checkpoint,
                dtype=recipe.dtypes[0],
            ),
            recipe,
        )
        for recipe in recipes
        for backend in recipe.backends
        if compile == "none" or backend not in recipe.eager
    ]


def _meant(rungs: Sequence[Arm]) -> Iterator[Arm]:
    """The arms that the request is about, out of all rungs up to it: the uncompiled ones, which
    recomputed and compiled ones are compared with, and the last."""
    yield from (arm for arm in rungs if not arm.compiler)
    yield rungs[-1]


def _first(specs: Sequence[Spec]) -> Iterator[Case]:
    """Cases of these Specs on every kind of data, then, uncompiled, with several steps,
    microbatches, evaluation and reload. Backend by backend: a compiled program serves all data, and
    is discarded once another is compiled."""
    around: tuple[dict[str, Any], ...] = (
        {"events": _TRAINING},
        {"steps": 3},
        {"steps": 2, "microbatches": 2},
        {"lifecycle": "reload"},
    )
    for spec in specs:
        eager = msgspec.structs.replace(spec, compile="none")
        # first, so that it is judged even where there is no time to compile
        yield Case(spec=eager, data=DataSpec())
        if spec != eager:
            yield Case(spec=spec, data=DataSpec())
        yield from (Case(spec=spec, data=DataSpec(values=v, seed=1)) for v in _VALUES[1:])
        for change in around:
            yield Case(spec=msgspec.structs.replace(eager, **change), data=DataSpec(seed=2))


def _other_sizes(models: Sequence[Model], recipes: Sequence[Recipe]) -> Iterator[Case]:
    """One uncompiled case of each model that ``build`` returns for other values of its
    parameters."""
    for model in models:
        for spec in _specs(model, recipes[:1], "none", "none")[:1]:
            yield Case(spec=spec, data=DataSpec(seed=3))


def _head(one: _Configuration, first: int, specs: Sequence[Spec]) -> str:
    """The text at the beginning: what is checked, for how long, whether compiling fits into that
    time, and notes about the model."""
    options, model, wanted = one.options, one.model, one.wanted
    minutes = options.minutes or _MINUTES
    length = f"{minutes:g} minute{'s' * (minutes != 1)}"
    then = plural(options.cases, "case") if options.cases else length
    chosen = sum(named(name, one.only) for name in model.linears)
    of = f"{chosen} of " if chosen < len(model.linears) else ""
    sizes = f" and {len(one.others)} other sizes" if one.others else ""
    linears = f"{of}{plural(len(model.linears), 'linear')}{sizes}"
    lines = []
    if not options.recipes:
        lines.append(
            f"no --recipe given: testing {', '.join(wanted)}, the model as it is built, without "
            "FP8 or MX; narrowfuzz list recipes shows others"
        )
    lines += [
        f"{model.title}: {linears}; {', '.join(wanted)}, --compile {one.compile}, --checkpoint "
        f"{one.checkpoint}",
        f"first {plural(first, 'case')} of this configuration and near it, on {len(_VALUES)} kinds "
        f"of data; then random ones around it, on all {len(WILD)} kinds, for "
        f"{then} in all",
    ]
    if one.compile != "none":
        programs = sum(spec.compile != "none" for spec in specs)
        seconds = None if options.cases else 60 * minutes
        lines.append(_compiling(one.compile, len(model.linears), programs, seconds))
    if model.unrepeatable and one.checkpoint != "none":
        lines.append(
            f"note: {model.unrepeatable} computes something else when it is called again with the "
            "same inputs, as a block does that writes into a cache of keys and values: a "
            "checkpoint of it alone would not compute what its forward did, so the model is "
            "checkpointed as a whole (transformers: use_cache=False)"
        )
    if model.changing:
        names = few([name.removeprefix("model.") for name in model.changing], _NAMED)
        more = "" if one.checkpoint == "none" else "; a checkpoint's recompute changes them again"
        lines.append(
            f"note: each forward changes its buffers {names}: every run begins with what it is "
            f"built with, and those that a state_dict holds are compared at the end{more}"
        )
    if model.unreached:
        names = few(model.unreached, _NAMED)
        lines.append(
            f"note: no gradient reaches {names} in one call with what it is built with: nothing "
            "that it returns depends on that"
        )
    return "\n".join(lines)


def _compiling(compiler: str, linears: int, programs: int, seconds: float | None) -> str:
    """A sentence on how long compiling takes, and whether there is time for it."""
    starts, more = _COMPILES["inductor" if compiler == "inductor" else "aot_eager"]
    each = starts + more * linears
    text = f"compiled {plural(programs, 'time')}, each in about {each:.0f} seconds"
    if seconds is None or each < seconds * _SHARE:
        return text
    least = math.ceil(each / _SHARE / 60)
    return f"{text}: that may not fit into {seconds / 60:g} minutes, give it --minutes {least}"
