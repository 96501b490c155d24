"""``narrowfuzz check``: a user's own model, first as it is trained, then its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from narrowfuzz.arm import climb
from narrowfuzz.campaign.asked import Asked
from narrowfuzz.case import Case, Checkpoint, Compile, DataSpec, Spec, ValueClass
from narrowfuzz.catalog import Model
from narrowfuzz.device import torch_name
from narrowfuzz.environment import prepare
from narrowfuzz.facts import Fact
from narrowfuzz.own_models import register
from narrowfuzz.recipe import Recipe, load_recipes, runnable, select, unknown
from narrowfuzz.schedule.events import Backward, Forward, Reload, Step
from narrowfuzz.specs import fixed

#: A step, an evaluation in between, a reload, and another step.
_TRAINING = (
    Forward(), Backward(of=(0,)), Step(), Forward(mode="eval"), Reload(),
    Forward(), Backward(of=(2,)), Step(),
)  # fmt: skip
#: The data that the user's configuration meets first, tamest first.
_VALUES: tuple[ValueClass, ...] = (
    "gaussian", "outlier", "heavy_tail", "zero_rows", "binade_edges", "inf_nan",
)  # fmt: skip


def check_command(asked: Asked, compile: str, checkpoint: str) -> int:
    """Check ``asked.models[0]``; returns the exit code. Raises ValueError for a model that cannot
    be judged, or an option that does not exist."""
    if compile not in get_args(Compile):
        raise ValueError(unknown("value", compile, get_args(Compile), of="--compile"))
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(unknown("value", checkpoint, get_args(Checkpoint), of="--checkpoint"))
    (text,) = asked.models
    prepare(asked.plant)
    model = register(text)
    device = torch_name(asked.device or "cpu")
    every = load_recipes(asked.recipe_files)
    wanted = asked.recipes or (f"torch.{model.fixed['dtype']}",)
    recipes = [here for r in select(every, wanted).values() if (here := runnable(r, device))]
    if not recipes:
        raise ValueError(
            f"none of {', '.join(wanted)} can run here: narrowfuzz list recipes says why"
        )
    first = tuple(_first(model, recipes, compile, checkpoint))  # type: ignore[arg-type]
    arms = dict.fromkeys(arm.name for case in first for arm in climb(case.spec))
    compiled = sum(bool(arm.compiler) for case in first for arm in climb(case.spec))
    then = f"{asked.cases} cases" if asked.cases else f"{asked.minutes or 2.0:g} minutes"
    print(
        f"{model.title}: {len(model.linears)} linears; {', '.join(wanted)}, --compile {compile}, "
        f"--checkpoint {checkpoint}\nfirst {len(first)} cases of this configuration and near it"
        + (f", which compile {compiled} times at about ten seconds each" if compiled else "")
        + f"; then what is drawn around it, until {then} are over"
    )
    facts: dict[str, Fact] = {
        "dtype": first[0].spec.dtype, "checkpoint": checkpoint, "compile": compile,
        "memory_budget": 100, "grad_mode": "train", "autocast": False, "dynamic": False,
    }  # fmt: skip
    from narrowfuzz.campaign.main import run_command

    return run_command(
        replace(
            asked, recipes=wanted, arms=tuple(arms), first=first, linears=False,
            configuration=facts,
        )
    )  # fmt: skip


def _first(
    model: Model, recipes: Sequence[Recipe], compile: Compile, checkpoint: Checkpoint
) -> Iterator[Case]:
    """The configuration that was asked for on every kind of data, then what happens around it."""
    asked = [
        fixed(
            Spec(
                recipe=recipe.name, backend=backend, model=model.name, compile=compile,
                checkpoint=checkpoint, dtype=recipe.dtypes[0],
            ),
            recipe,
        )
        for recipe in recipes for backend in recipe.backends
    ]  # fmt: skip
    for spec in asked:  # what needs no compiler is judged even where there is no time for one
        yield Case(spec=msgspec.structs.replace(spec, compile="none"), data=DataSpec())
    for spec in asked:
        if spec.compile != "none":
            yield Case(spec=spec, data=DataSpec())
    around: tuple[dict[str, Any], ...] = (
        {"events": _TRAINING}, {"steps": 3}, {"steps": 2, "microbatches": 2},
        {"lifecycle": "reload"},
    )  # fmt: skip
    for spec in asked:
        yield from (Case(spec=spec, data=DataSpec(values=v, seed=1)) for v in _VALUES[1:])
        for change in around:
            eager = msgspec.structs.replace(spec, compile="none", **change)
            yield Case(spec=eager, data=DataSpec(seed=2))
