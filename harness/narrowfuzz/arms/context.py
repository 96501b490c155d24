"""Run a case whose ranks share the rows of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from narrowfuzz.arm import Arm
from narrowfuzz.arms.training import making, named, playing
from narrowfuzz.case import Spec
from narrowfuzz.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.context import play_context
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.player import Trace
from narrowfuzz.recipe import Recipe

#: What of ``playing`` it takes.
_OF_CONTEXT = ("input_shape", "output_shape", "optimizer", "rate", "tied")


def play_rows(
    on: Callable[..., list[Trace]],
    spec: Spec,
    recipe: Recipe,
    tensors: Mapping[str, F32],
    arm: Arm,
    device: str,
) -> list[Trace]:
    """Each rank trains on its rows of each sequence."""

    def build() -> nn.Module:
        return MODELS[spec.model].build(spec, dtype=DTYPES[spec.dtype], device=device)

    given = {name: torch.from_numpy(x.copy()) for name, x in named(spec, tensors).items()}
    return play_context(
        build, lambda model: recipe.convert(model, spec), given, on=on, dtype=DTYPES[spec.dtype],
        **rows_of(spec, arm, device),
    )  # fmt: skip


def rows_of(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What ``play_context`` takes by keyword, but for the dtype and what runs it."""
    how = playing(spec, arm, device)
    return {
        **{name: how[name] for name in _OF_CONTEXT},
        **making(spec, arm, device),
        "watch": (),
        "context": spec.sharding.context,
        "rotates": spec.sharding.rotates,
        "steps": spec.steps,
        "microbatches": spec.microbatches,
    }
