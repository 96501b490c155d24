"""``narrowfuzz check``: a user's own model, first as it is trained, then its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import msgspec

from narrowfuzz.arm import climb
from narrowfuzz.campaign.asked import Asked
from narrowfuzz.case import Case, Checkpoint, Compile, DataSpec, Spec, ValueClass
from narrowfuzz.catalog import Model
from narrowfuzz.device import torch_name
from narrowfuzz.environment import prepare
from narrowfuzz.own_models import register
from narrowfuzz.recipe import Recipe, load_recipes, runnable, select, unknown
from narrowfuzz.specs import fixed

#: The data that the user's configuration meets first, tamest first.
_VALUES: tuple[ValueClass, ...] = (
    "gaussian", "outlier", "heavy_tail", "zero_rows", "binade_edges", "inf_nan",
)  # fmt: skip


def check_command(asked: Asked, compile: str, checkpoint: str) -> int:
    """Check ``asked.models[0]``; returns the exit code. Raises ValueError for a model that cannot
    be judged, or an option that does not exist."""
    for kind, name, known in (
        ("--compile", compile, get_args(Compile)), ("--checkpoint", checkpoint, get_args(Checkpoint))
    ):  # fmt: skip
        if name not in known:
            raise ValueError(unknown("value", name, known, of=kind))
    (text,) = asked.models
    prepare(asked.plant)
    model = register(text)
    device = torch_name(asked.device or "cpu")
    every = load_recipes(asked.recipe_files)
    wanted = asked.recipes or (f"torch.{model.fixed['dtype']}",)
    recipes = [here for r in select(every, wanted).values() if (here := runnable(r, device))]
    first = tuple(_first(model, recipes, compile, checkpoint))  # type: ignore[arg-type]
    arms = dict.fromkeys(arm.name for case in first for arm in climb(case.spec))
    print(f"{model.title}: as {', '.join(wanted)}, --compile {compile}, --checkpoint {checkpoint}")
    from narrowfuzz.campaign.main import run_command

    return run_command(replace(asked, recipes=wanted, arms=tuple(arms), first=first, linears=False))


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
    for spec in asked:
        yield Case(spec=spec, data=DataSpec())
    around = {"steps": 3}, {"steps": 2, "microbatches": 2}, {"lifecycle": "reload"}
    for spec in asked:
        yield from (Case(spec=spec, data=DataSpec(values=v, seed=1)) for v in _VALUES[1:])
        for change in around:
            eager = msgspec.structs.replace(spec, compile="none", **change)
            yield Case(spec=eager, data=DataSpec(seed=2))
