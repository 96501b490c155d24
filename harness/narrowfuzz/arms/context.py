"""Run a case whose ranks share the rows of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narrowfuzz.arm import Arm
from narrowfuzz.arms.pipeline import given_of, made, stepping
from narrowfuzz.case import Spec
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.context import play_context
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.player import Trace
from narrowfuzz.recipe import Recipe


def play_rows(
    on: Callable[..., list[Trace]],
    spec: Spec,
    recipe: Recipe,
    tensors: Mapping[str, F32],
    arm: Arm,
    device: str,
) -> list[Trace]:
    """Each rank trains on its rows of each sequence."""
    build, convert = made(spec, recipe, device)
    return play_context(
        build, convert, given_of(spec, tensors), on=on, dtype=DTYPES[spec.dtype],
        **rows_of(spec, arm, device),
    )  # fmt: skip


def rows_of(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What ``play_context`` takes by keyword, but for the dtype and what runs it."""
    sharding = spec.sharding
    shared = {"context": sharding.context, "rotates": sharding.rotates}
    return stepping(spec, arm, device) | shared
