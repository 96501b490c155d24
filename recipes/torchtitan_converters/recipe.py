"""torchtitan's own model converters, on its own Llama 3: ``--with torchtitan==0.1.0``.

Each converter is built as torchtitan builds it, with its default filter or with one that users
write. It converts to torchao's layers, so plans, taps and known issues are those of torchao's
recipes. Two things differ from the machine that torchtitan requires: it may run without a GPU, and
MX products are emulated.

    torch        MXFP8, all casts torchao's own PyTorch code; in 0.3 this backend is "linear", as in
                 torchao's recipes
    interpreted  MXFP8 with the cast along dim1 as torchtitan has it by default: a Triton kernel,
                 which Triton's interpreter runs once for each shape. That shows whether it runs or
                 refuses; numbers are the PyTorch cast's, because the interpreter rounds differently
                 from a GPU.

From 0.3 on converters change configurations, and get other lists of layers' names.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

from narrowfuzz.recipe.content import content_dir, load_definitions
from narrowfuzz.recipe.recipe import Recipe

from . import configurations, jobs, promises

_INTERPRETS = {"TRITON_INTERPRET": "1"}
#: Filters for 0.1 and 0.2, as in torchtitan's documentation; None: the converter's default.
_LEFT_OUT: dict[str, tuple[str, ...] | None] = {
    "": None,
    ".unfiltered": (),
    ".partial": ("attention.wq", "attention.wk", "attention.wv", "output"),
}


def _torchao(file: str, name: str) -> Recipe:
    found = load_definitions(content_dir("recipes") / file, "recipe", "RECIPES", (Recipe,))
    return next(recipe for recipe in found if recipe.name == name)


def _recipe(theirs: Recipe, name: str, how: str, **fields: Any) -> Recipe:
    """torchao's recipe as torchtitan converts to it."""
    return dataclasses.replace(
        theirs,
        name=f"torchtitan.{name}",
        title=f"{theirs.title}; {how}",
        package="torchtitan>=0.1,<0.4",
        based_on=theirs.name,
        models_of="torchtitan",
        process="torchtitan",
        dtypes=("bf16",),
        autocast=None,
        leaves_out={
            "dtype=fp32": "torchtitan trains in bf16",
            "dtype=fp16": "torchtitan trains in bf16",
        },
        **fields,
    )


def _of_jobs(theirs: Recipe, recipe: str, which: str, **fields: Any) -> Recipe:
    """A recipe for 0.1 and 0.2."""
    filters = _LEFT_OUT[which]
    how = "torchtitan's default filter" if filters is None else f"filter_fqns={list(filters)}"
    return _recipe(
        theirs,
        (recipe if recipe == "mxfp8" else f"float8.{recipe}") + which,
        how,
        convert=partial(jobs.convert, recipe=recipe, filters=filters),
        convertible=partial(jobs.convertible, recipe=recipe, filters=filters),
        **fields,
    )


def _mxfp8_of_jobs(which: str) -> Recipe:
    theirs = _torchao("torchao_mxfp8.py", "torchao.mxfp8.floor")
    return _of_jobs(
        theirs,
        "mxfp8",
        which,
        backends=("torch", "interpreted"),
        backend_words={
            "torch": "torch casts, torchao emulates the product",
            "interpreted": "Triton's interpreter casts, torchao emulates the product",
        },
        eager=("interpreted",),
        refusal=partial(promises.refusal, filters=_LEFT_OUT[which]),
        tap=jobs.tap if promises.old() else theirs.tap,
        # with the torchao of 0.1, tensors mix with DTensors in their scales, and raise
        shards=("fsdp",) if promises.old() else ("fsdp", "tensor"),
        converted=jobs.converted_to_mx,
        unavailable=promises.unavailable_mx,
        environment=_INTERPRETS,
        prepare=jobs.prepare,
    )


def _shards(recipe: str) -> tuple[Literal["fsdp", "tensor", "codes"], ...]:
    """With one scale a tensor, ``apply_tp`` communicates codes; torchao's tensors support that in
    torch 2.11 and newer from torchao 0.17 on."""
    newer = promises.release("torchao") >= (0, 17)
    return ("fsdp", "tensor", "codes") if recipe == "tensorwise" and newer else ("fsdp", "tensor")


def _all_of_jobs() -> list[Recipe]:
    float8 = [
        _of_jobs(
            _torchao("torchao_float8.py", f"torchao.float8.{recipe}"),
            recipe,
            which,
            tap=jobs.tap_float8,
            shards=_shards(recipe),
        )
        for recipe in ("tensorwise", "rowwise")
        for which in ("", ".partial")
    ]
    return [*map(_mxfp8_of_jobs, _LEFT_OUT), *float8]


def _of_configurations(theirs: Recipe, name: str, option: str, **fields: Any) -> Recipe:
    """A recipe for 0.3: ``option`` is the field of the converter that names layers."""
    given = {"recipe": fields.pop("recipe"), "filters": fields.pop("filters")}
    how = f"{option}={list(given['filters'])}"
    return _recipe(
        theirs,
        name + (".partial" if given["filters"] else ""),
        how,
        convert=partial(configurations.convert, **given),
        convertible=partial(configurations.convertible, **given),
        refusal=partial(configurations.refusal, **given),
        **fields,
    )


def _all_of_configurations() -> list[Recipe]:
    """Recipes with the converter's default and with the layers in torchtitan's configurations."""
    mxfp8 = [
        _of_configurations(
            _torchao("torchao_mxfp8.py", "torchao.mxfp8.rceil"),
            "mxfp8",
            "fqns",
            recipe="mxfp8",
            filters=filters,
            backends=("linear",),  # torchao's MXFP8Linear, emulated
            # MXFP8Linear loses how a DTensor is sharded, and torchtitan asserts that
            shards=("fsdp",),
            unavailable=configurations.unavailable_mx,
        )
        for filters in ((), ("attention", "feed_forward"))
    ]
    float8 = [
        _of_configurations(
            _torchao("torchao_float8.py", f"torchao.float8.{ours}"),
            f"float8.{ours}",
            "filter_fqns",
            recipe=recipe,
            filters=filters,
            shards=("fsdp", "tensor"),
        )
        for ours, recipe in (("rowwise", "rowwise"), ("rowwise_gw_hp", "rowwise_with_gw_hp"))
        for filters in ((), ("lm_head",))
    ]
    return [*mxfp8, *float8]


RECIPES = _all_of_configurations() if promises.configured() else _all_of_jobs()
