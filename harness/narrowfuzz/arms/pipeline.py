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

#: What of ``playing`` a pipeline takes.
_OF_PIPELINE = ("input_shape", "output_shape", "optimizer", "rate")


def play_alone(
    trace: Trace, spec: Spec, recipe: Recipe, tensors: Mapping[str, F32], device: str
) -> None:
    """The chain trains in one process."""
    build, convert = _made(spec, recipe, device)
    how = playing(spec, EAGER, device) | {"tied": names(spec)}
    play(
        trace, lambda: chained(build, spec.sharding.stages), convert, _given(spec, tensors),
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
    build, convert = _made(spec, recipe, device)
    return play_pipeline(
        build, convert, _given(spec, tensors), on=on, dtype=DTYPES[spec.dtype],
        **stages_of(spec, arm, device),
    )  # fmt: skip


def stages_of(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What ``play_pipeline`` takes by keyword, but for the dtype and what runs it."""
    how = playing(spec, arm, device)
    return {
        **{name: how[name] for name in _OF_PIPELINE},
        **making(spec, arm, device),
        "watch": (),
        "stages": spec.sharding.stages,
        "schedule": spec.sharding.schedule,
        "steps": spec.steps,
        "microbatches": spec.microbatches,
        "tied": names(spec),
    }


def names(spec: Spec) -> dict[str, str]:
    """Parameter of the chain -> the tensor that it is filled with: all stages begin alike."""
    every = parameter_shapes(spec)
    return {f"{stage}.{name}": name for stage in range(spec.sharding.stages) for name in every}


def _made(
    spec: Spec, recipe: Recipe, device: str
) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]:
    def build() -> nn.Module:
        return MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)

    return build, lambda model: recipe.convert(model, spec)


def _given(spec: Spec, tensors: Mapping[str, F32]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x.copy()) for name, x in named(spec, tensors).items()}
