"""Run a case's model several times in a row, as a pipeline on ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from narrowfuzz.arm import EAGER, Arm
from narrowfuzz.arms.training import events_of, making, named, playing
from narrowfuzz.case import Spec
from narrowfuzz.catalog import MODELS
from narrowfuzz.models.zoo import parameter_shapes
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.converted import play
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.pipeline import chained, play_pipeline
from narrowfuzz.play.player import Trace
from narrowfuzz.recipe import Recipe

#: What of ``playing`` plain steps take.
_STEPPING = ("input_shape", "output_shape", "optimizer", "rate", "tied")


def play_alone(
    trace: Trace, spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], device: str
) -> None:
    """The chain trains in one process."""
    build, convert = made(spec, recipe, device)
    how = playing(spec, EAGER, device) | {"tied": names(spec)}
    play(
        trace, lambda: chained(build, spec.sharding.stages), convert, given_of(spec, tensors),
        events_of(spec), dtype=DTYPES[spec.dtype], **how,
    )  # fmt: skip


def play_stages(
    on: Callable[..., list[Trace]],
    spec: Spec,
    recipe: Recipe,
    tensors: Mapping[str, F32],
    arm: Arm,
    device: str,
) -> list[Trace]:
    """Each rank trains its own stages."""
    build, convert = made(spec, recipe, device)
    return play_pipeline(
        build, convert, given_of(spec, tensors), on=on, dtype=DTYPES[spec.dtype],
        **stages_of(spec, arm, device),
    )  # fmt: skip


def stages_of(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What ``play_pipeline`` takes by keyword, but for the dtype and what runs it."""
    return stepping(spec, arm, device) | {
        "stages": spec.sharding.stages,
        "schedule": spec.sharding.schedule,
        "tied": names(spec),
    }


def stepping(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What a training by plain steps takes by keyword, whatever its ranks share."""
    how = playing(spec, arm, device)
    steps = {"watch": (), "steps": spec.steps, "microbatches": spec.microbatches}
    return {name: how[name] for name in _STEPPING} | making(spec, arm, device) | steps


def names(spec: Spec) -> dict[str, str]:
    """Parameter of the chain -> the tensor that it is filled with: all stages begin alike."""
    every = parameter_shapes(spec)
    return {f"{stage}.{name}": name for stage in range(spec.sharding.stages) for name in every}


def made(
    spec: Spec, recipe: Recipe, device: str
) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]:
    """What builds a model, and what converts it."""

    def build() -> nn.Module:
        return MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)

    return build, lambda model: recipe.convert(model, spec)


def given_of(spec: Spec, tensors: Mapping[str, F32]) -> dict[str, torch.Tensor]:
    """The tensors as the player takes them."""
    return {name: torch.from_numpy(x.copy()) for name, x in named(spec, tensors).items()}
