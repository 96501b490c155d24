"""``narrowfuzz check``: judge a user's own model, first as it is trained, then in configurations
near that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from narrowfuzz.arms.available import only_ranks, select_arms, unavailable
from narrowfuzz.campaign.campaign import consoles
from narrowfuzz.campaign.check_head import VALUES, Configuration, head
from narrowfuzz.campaign.config import MINUTES
from narrowfuzz.campaign.pace import LARGE, said_of_pace, seconds_of_cases
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.arm import SHARDED, Arm, Compile
from narrowfuzz.case.events import Backward, Forward, Reload, Step
from narrowfuzz.case.ladder import climb
from narrowfuzz.case.layout import MESH, fitting
from narrowfuzz.case.layout.mesh import ways_of_ddp, why_alone
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, Checkpoint, DataSpec, Spec
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.draw.specs import fixed
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
    chosen = select_arms(options.arms)
    alone = () if only_ranks(options.arms) else (*_first(asked_of), *_others(one))
    on_ranks = not (pace and alone)  # slow models only if nothing else is asked for
    ranks = [case for case in _on_ranks(one, device) if on_ranks and _ranks_of(case) & {*chosen}]
    first = (*alone, *ranks)
    climbed = dict.fromkeys(arm.name for case in first for arm in climb(case.spec))
    arms = tuple(name for name in climbed if name in chosen)
    if not arms:
        able = (*_first(asked_of), *_others(one), *_on_ranks(one, device))
        runs = ", ".join(dict.fromkeys(arm.name for case in able for arm in climb(case.spec)))
        says = f"this configuration runs {runs}; --compile and --checkpoint say more"
        if not alone and not ranks and (why := _why_not_on_ranks(one, device)):
            says = f"no ranks can train {one.model.title}, as {why}"
        raise ValueError(f"--arm {' '.join(options.arms)}: {says}")
    meant = dict.fromkeys(arm.name for spec in asked_of for arm in _meant(climb(spec)))
    meant |= dict.fromkeys(arm.name for case in ranks for arm in climb(case.spec))
    _, around = consoles(options)
    around.print(head(one, len(first), asked_of, len(ranks)), markup=False)
    if pace:
        minutes = None if options.cases else options.minutes or MINUTES
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
) -> Configuration:
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
    return Configuration(options, model, others, compile, checkpoint, only, wanted, recipes)  # type: ignore[arg-type]


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
        yield from (Case(spec=spec, data=DataSpec(values=v, seed=1)) for v in VALUES[1:])
        for change in around:
            yield Case(spec=msgspec.structs.replace(eager, **change), data=DataSpec(seed=2))


def _on_ranks(one: Configuration, device: str) -> Iterator[Case]:
    """For each recipe two uncompiled cases on two ranks, a batch on each: FSDP with two steps, and
    DDP. None where ranks cannot train the model."""
    if unavailable(SHARDED, device) or not MESH.takes(one.model.name):
        return
    ddp = Sharding(data=2, replicas=2, ddp=ways_of_ddp(one.model)[0])
    fsdp = Sharding(data=2, units="each")
    layouts: dict[Sharding, dict[str, Any]] = {fsdp: {"steps": 2, "optimizer": "adamw"}, ddp: {}}
    for recipe in one.recipes:
        spec = _specs(one.model, [recipe], "none", one.checkpoint)[0]
        for sharding, change in layouts.items():
            laid = msgspec.structs.replace(spec, sharding=sharding, grad_mode="train", **change)
            if not [*MESH.objections(laid, recipe.shards)]:
                yield Case(spec=fitting(laid), data=DataSpec(seed=4))


def _ranks_of(case: Case) -> set[str]:
    """The names of its arms on ranks."""
    return {arm.name for arm in climb(case.spec) if arm.sharded}


def _why_not_on_ranks(one: Configuration, device: str) -> str:
    """Why arms on ranks do not run the model, as the end of a sentence."""
    unable = [r.name for r in one.recipes if not r.shards]
    lacking = f"no layout over ranks is known for {', '.join(unable)}" if unable else ""
    return why_alone(one.model) or unavailable(SHARDED, device) or lacking


def _others(one: Configuration) -> Iterator[Case]:
    """One uncompiled case of each model that ``build`` returns for other values of its
    parameters."""
    for model in one.others:
        for spec in _specs(model, one.recipes[:1], "none", "none")[:1]:
            yield Case(spec=spec, data=DataSpec(seed=3))
