"""Hypothesis strategies for sharded Specs: how a model is laid out over ranks.

What is drawn is what PyTorch and the recipe's library say that they run: rows that the ranks share
evenly, as data loaders deal them, and parameters of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case import ModelName, Sharding, Spec
from narrowfuzz.catalog import MODELS
from narrowfuzz.choices import one_of
from narrowfuzz.recipe import Recipe
from narrowfuzz.sharding import fitting, shardable
from narrowfuzz.specs import specs

#: What may vary of a Spec that is sharded.
FACTORS = frozenset({"backend", "batch", "bias", "checkpoint", "dims", "dtype", "model", "shape"})
#: Data-parallel and tensor-parallel ranks, as often.
_LAYOUTS = (
    (2, 0), (2, 0), (4, 0), (3, 0), (1, 0), (0, 2), (0, 2), (0, 4), (0, 1), (2, 2), (2, 2), (1, 2),
)  # fmt: skip
#: Models besides the linear that are drawn on ranks.
SHARDABLE = tuple(name for name in MODELS if name != "linear" and shardable(name, ("fsdp",)))


@st.composite
def sharded_specs(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    models: tuple[ModelName, ...] = SHARDABLE,
    *,
    largest: int = 64,
) -> Spec:
    """A Spec of one of ``recipes``, laid out over ranks in a way that its recipe shards."""
    recipe = draw(one_of(*recipes))
    data, tensor = draw(one_of(*(lay for lay in _LAYOUTS if _shards(recipe, *lay))))
    recipe = replace(recipe, backends=tuple(b for b in recipe.backends if b not in recipe.eager))
    able = tuple(m for m in models if recipe.takes(m) and (MODELS[m].shared or not tensor))
    spec = draw(specs([recipe], vary=FACTORS, models=able or ("linear",), largest=largest))
    if spec.dtype == "fp16":  # its gradients are divided before they are added
        spec = msgspec.structs.replace(spec, dtype="bf16")
    if tensor and not MODELS[spec.model].shared:
        spec = msgspec.structs.replace(spec, model="linear")
    codes = "codes" in recipe.shards
    sequence = bool(tensor) and draw(one_of(False, True))
    narrow = codes and bool(tensor) and draw(one_of(False, True))
    sharding = Sharding(
        data=data,
        tensor=tensor,
        style=draw(one_of("colwise", "rowwise"))
        if tensor and spec.model == "linear"
        else "colwise",
        sequence=sequence,
        narrow_styles=narrow,
        local_output=not tensor or draw(one_of(True, True, False)),
        gathers=draw(one_of("values", "codes", "precomputed")) if data and codes else "values",
        units=draw(one_of("whole", "each")) if data else "whole",
        reduces_fp32=bool(data) and draw(one_of(False, True)),
        averages=not data or draw(one_of(True, True, False)),
        processes=draw(one_of(*[False] * 9, True)),
    )
    steps, microbatches = draw(one_of((1, 1), (1, 1), (1, 1), (2, 1), (1, 2)))
    if steps > 1:
        sharding = msgspec.structs.replace(
            sharding, resumes=draw(one_of("", *_resumes(spec.model, recipe, sharding)))
        )
    compiles = [False] * 9 + [True] * MODELS[spec.model].compiled
    return fitting(
        msgspec.structs.replace(
            spec, sharding=sharding, steps=steps, microbatches=microbatches, grad_mode="train",
            optimizer=draw(one_of("sgd", "adamw")),
            compile="aot_eager" if draw(one_of(*compiles)) else "none",
        )
    )  # fmt: skip


def _shards(recipe: Recipe, data: int, tensor: int) -> bool:
    asked = {"fsdp": data, "tensor": tensor}
    few = not recipe.models_of or max(data, tensor) <= 2  # a package's own models are large
    return few and all(by in recipe.shards for by, ranks in asked.items() if ranks)


def _resumes(model: ModelName, recipe: Recipe, sharding: Sharding) -> tuple[str, ...]:
    """The layouts on which such a training may resume."""
    able = MODELS[model].shared and not MODELS[model].laid
    both = able and _shards(recipe, sharding.tensor, sharding.data) and sharding.gathers == "values"
    fewer = ("fewer",) if sharding.data > 1 else ()
    return ("same", "alone", *fewer, *(("swapped",) if both else ()))
