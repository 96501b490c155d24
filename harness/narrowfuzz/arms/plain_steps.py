"""Run a case whose ranks train by plain steps: each has stages of a pipeline, which is the case's
model several times in a row, or each its rows of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from narrowfuzz.arms.training import events_of, making, named, playing
from narrowfuzz.arms.zoo import parameter_shapes
from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.context import play_context
from narrowfuzz.play.converted import play
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.pipeline import chained, play_pipeline
from narrowfuzz.play.player import Trace
from narrowfuzz.recipe.recipe import Recipe

#: What of ``playing`` plain steps take.
_TAKEN = ("input_shape", "output_shape", "optimizer", "rate", "tied")


def play_chain(
    trace: Trace, spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], device: str
) -> None:
    """The chain of a pipeline's stages trains in one process."""
    build, convert, given = _given(spec, recipe, tensors, device)
    how = playing(spec, EAGER, device) | {"tied": names_in_chain(spec)}
    play(
        trace, lambda: chained(build, spec.sharding.stages), convert, given, events_of(spec),
        dtype=DTYPES[spec.dtype], **how,
    )  # fmt: skip


def play_steps(
    on: Callable[..., list[Trace]],
    spec: Spec,
    recipe: Recipe,
    tensors: Mapping[str, F32],
    arm: Arm,
    device: str,
) -> list[Trace]:
    """Each rank trains its own stages, or on its own rows."""
    on_ranks: Any = play_pipeline if spec.sharding.stages else play_context
    traces: list[Trace] = on_ranks(
        *_given(spec, recipe, tensors, device), on=on, dtype=DTYPES[spec.dtype],
        **steps_of(spec, arm, device),
    )  # fmt: skip
    return traces


def steps_of(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What ``play_pipeline`` or ``play_context`` takes by keyword, but for the dtype and what runs
    it."""
    how, sharding = playing(spec, arm, device), spec.sharding
    taken = {name: how[name] for name in _TAKEN} | making(spec, arm, device)
    taken |= {"watch": (), "steps": spec.steps, "microbatches": spec.microbatches}
    if sharding.context:
        return taken | {"context": sharding.context, "rotates": sharding.rotates}
    stages = {"stages": sharding.stages, "schedule": sharding.schedule}
    return taken | stages | {"tied": names_in_chain(spec)}


def names_in_chain(spec: Spec) -> dict[str, str]:
    """Parameter of the chain -> the tensor that it is filled with: all stages begin alike."""
    every = parameter_shapes(spec)
    return {f"{stage}.{name}": name for stage in range(spec.sharding.stages) for name in every}


def _given(
    spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], device: str
) -> tuple[
    Callable[[], nn.Module], Callable[[nn.Module], nn.Module], dict[str, torch.Tensor]
]:  # fmt: skip
    """What builds a model and what converts it, and the tensors as the player takes them."""

    def build() -> nn.Module:
        return MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)

    given = {name: torch.from_numpy(x.copy()) for name, x in named(spec, tensors).items()}
    return build, lambda model: recipe.convert(model, spec), given
