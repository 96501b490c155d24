"""torchtitan's own model converters, on its own Llama 3: ``--with torchtitan==0.1.0``.

Each converter is built of torchtitan's own job configuration, with its default filter or with one
of those that users write. What it converts to is torchao's, so plans, taps and all that is known
are those of torchao's recipes. Two things are not as on the machine that torchtitan wants, and both
are set where its converter reads them: it may run without a GPU, and MX products are emulated
(NAME_MAP says mxfp8_cublas, which a CPU has no kernel for).

    torch        MXFP8, all casts torchao's own PyTorch code
    interpreted  MXFP8 with the cast along dim1 as torchtitan has it by default: a Triton kernel,
                 which Triton's interpreter runs once for each shape. That shows whether it runs or
                 refuses; numbers are the PyTorch cast's, as the interpreter rounds otherwise than
                 a GPU does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

from narrowfuzz.case import Spec
from narrowfuzz.catalog import MODELS
from narrowfuzz.content import content_dir, load_definitions
from narrowfuzz.models.zoo import parameter_shapes
from narrowfuzz.recipe import Emit, Recipe, named

#: Triton's interpreter runs a kernel of the largest of the tiles that it may be tuned to.
TILE = 128
#: As torchtitan's documentation has them; None: the converter's default.
FILTERS: dict[str, tuple[str, ...] | None] = {
    "": None,
    ".unfiltered": (),
    ".partial": ("attention.wq", "attention.wk", "attention.wv", "output"),
}
_INTERPRETS = {"TRITON_INTERPRET": "1"}


def _convert(
    model: Any,
    spec: Spec,
    *,
    recipe: str,
    filters: tuple[str, ...] | None,
    only: tuple[str, ...] = (),
) -> Any:
    """Let torchtitan's converter convert a model: MX if that is the ``recipe``, else float8."""
    if spec.backend == "interpreted":
        _interpret()
    from narrowfuzz.recipe import named

    job, section, home, made = _job(recipe)
    if filters is not None:
        section.filter_fqns = list(filters)
    if recipe == "mxfp8" and spec.backend == "torch":
        _cast_by_torch(section)
    theirs = home.module_filter_fn

    def chosen(module: Any, name: str, filter_fqns: Any) -> bool:
        return bool(theirs(module, name, filter_fqns)) and named(name, only)

    with (
        patch.object(home, "has_cuda_capability", lambda major, minor: True),
        patch.object(home, "module_filter_fn", chosen),
    ):
        converter = made(job, None)
        if recipe != "mxfp8":
            emulate = spec.backend == "emulated"
            converter.config = dataclasses.replace(converter.config, emulate=emulate)
        elif hasattr(converter.config, "gemm_kernel_choice"):
            choices = type(converter.config.gemm_kernel_choice)
            converter.config.gemm_kernel_choice = choices.EMULATED
        converter.convert(model)
    return model


def _job(recipe: str) -> tuple[Any, Any, Any, Any]:
    """torchtitan's job configuration with this recipe, its section, and the converter's module and
    class, as 0.1 and 0.2 have them."""
    from torchtitan.components.quantization import float8, mx

    home = mx if recipe == "mxfp8" else float8
    try:
        from torchtitan.config_manager import JobConfig

        job = JobConfig()
        section = job.mx if recipe == "mxfp8" else job.float8
        made = "MXConverter" if recipe == "mxfp8" else "Float8Converter"
        section.recipe_name = recipe
    except ImportError:
        from torchtitan.config import JobConfig

        job = JobConfig()
        section = getattr(job.quantize.linear, "mx" if recipe == "mxfp8" else "float8")
        made = "MXLinearConverter" if recipe == "mxfp8" else "Float8LinearConverter"
        section.recipe_name = "mxfp8_emulated" if recipe == "mxfp8" else recipe
    return job, section, home, getattr(home, made)


def _cast_by_torch(section: Any) -> None:
    if hasattr(section, "use_fp8_dim1_cast_triton_kernel"):
        section.use_fp8_dim1_cast_triton_kernel = False
    else:
        section.mxfp8_dim1_cast_kernel_choice = "torch"


def _interpret() -> None:
    """Import torchao's MX modules with their Triton kernels, for Triton's interpreter; from then on
    the cast along dim1 runs once for each shape, and gives what PyTorch's does."""
    if "torchao.prototype.mx_formats.custom_cast" in sys.modules:
        return
    import torch.utils._triton as machine
    import triton

    tune = triton.autotune
    with (
        patch.object(machine, "has_triton", lambda: True),
        # there is nothing to tune by: the last is the largest tile
        patch.object(triton, "autotune", lambda configs, key, **how: tune(configs[-1:], key)),
    ):
        from torchao.prototype.mx_formats import custom_cast, mx_linear
    kernel, by_torch = mx_linear.triton_to_mxfp8_dim1, custom_cast.triton_to_mxfp8_dim1_reference
    ran: set[Any] = set()
    import numpy as np

    def cast(x: Any, inner_block_size: int = 32) -> Any:
        what = (tuple(x.shape), x.stride(), x.dtype, inner_block_size)
        if what not in ran:
            with np.errstate(all="ignore"):  # the interpreter computes with numpy
                kernel(x, inner_block_size)
            ran.add(what)
        return by_torch(x, inner_block_size)

    mx_linear.triton_to_mxfp8_dim1 = cast


def _prepare() -> None:
    """What is imported without the kernels stays without them."""
    if not _of_mx("interpreted", "cpu"):
        _interpret()


def _convertible(
    module: Any,
    name: str,
    spec: Spec,
    *,
    recipe: str,
    filters: tuple[str, ...] | None,
    only: tuple[str, ...] = (),
) -> bool:
    """As documented: linears whose dimensions are multiples of 16, but for the filtered ones."""
    from narrowfuzz.recipe import named
    from torch import nn

    if not isinstance(module, nn.Linear) or any(size % 16 for size in module.weight.shape):
        return False
    left_out = ("output",) if filters is None and recipe == "mxfp8" else filters or ()
    return not any(text in name for text in left_out) and named(name, only)


def _converted_to_mx(module: Any) -> bool:
    from torchao.prototype.mx_formats.mx_linear import MXLinear

    return isinstance(module, MXLinear)


@contextlib.contextmanager
def _before_mm(table: Any, show: Callable[[Any, Any], None]) -> Iterator[None]:
    """``show(a, b)`` is called before each mm of a library's own tensors."""
    import torch

    op = torch.ops.aten.mm.default
    multiply = table[op]

    def watch(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
        show(*args)
        return multiply(aten_op, args, kwargs)

    table[op] = watch
    try:
        yield
    finally:
        table[op] = multiply


def _tap(emit: Emit) -> contextlib.AbstractContextManager[None]:
    """The MX tensor's mm, as torchao 0.11 has it: scales are a flat list."""
    from torchao.prototype.mx_formats.mx_ops import MX_OPS_TABLE

    def show(a: Any, b: Any) -> None:
        a_codes, b_codes = a._data, b._data.t()
        if a_codes.shape[1] % a._block_size == 0:
            a_scale = a._scale_e8m0.reshape(a_codes.shape[0], -1)
            emit(a_codes, a_scale, b_codes, b._scale_e8m0.reshape(b_codes.shape[0], -1))

    return _before_mm(MX_OPS_TABLE, show)


def _tap_float8(emit: Emit) -> contextlib.AbstractContextManager[None]:
    """The float8 tensor's own mm; the order of maxima is not torchao 0.13's."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    def show(a: Any, b: Any) -> None:
        emit(a._data, a._scale, b._data.t(), b._scale.t())

    return _before_mm(FLOAT8_OPS_TABLE, show)


def _refusal(
    spec: Spec, device: str, *, filters: tuple[str, ...] | None, only: tuple[str, ...] = ()
) -> str:
    """What the casts of some layer refuse: the kernel wants whole tiles, the largest at that."""
    multiple = TILE if spec.backend == "interpreted" else 32
    for name, (out, features) in _linears(spec).items():
        if not _promised(name, out, features, filters=filters, only=only):
            continue
        sizes = {"tokens": spec.tokens, "in_features": features, "out_features": out}
        for what, size in sizes.items():
            if size % multiple:
                layer = name.removeprefix("model.")
                return (
                    f"{what} of {layer} must be a multiple of {multiple}, got {size} (its "
                    f"weight is {out} x {features}, and there are {spec.tokens} tokens)"
                )
    return ""


def _linears(spec: Spec) -> dict[str, tuple[int, int]]:
    """Name and weight's shape of every linear of the Spec's model."""
    if spec.model not in MODELS:
        return {}
    shapes = parameter_shapes(spec)
    found = {n.removesuffix(".weight"): s for n, s in shapes.items() if n.endswith(".weight")}
    return {n: (s[0], s[1]) for n, s in found.items() if len(s) == 2 and "embedding" not in n}


def _promised(
    name: str,
    out: int,
    features: int,
    *,
    filters: tuple[str, ...] | None,
    only: tuple[str, ...],
) -> bool:
    left_out = ("output",) if filters is None else filters
    aligned = out % 16 == 0 and features % 16 == 0
    return aligned and not any(text in name for text in left_out) and named(name, only)


def _unavailable(backend: str, device: str) -> str:
    if device != "cpu":
        return "it is emulated for CPUs: on a GPU torchao's own recipes run the same kernels"
    if backend != "interpreted":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, for its interpreter: --with torchtitan==0.1.0 brings it"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET=1 must be set before torch is imported: --with torchtitan sets it"
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _old() -> bool:
    """Is this torchtitan 0.1, whose converter knows another torchao than 0.2's?"""
    return _version("torchtitan").startswith("0.1.")


def _of_mx(backend: str, device: str) -> str:
    """Each builds the MXFP8 configuration of one torchao."""
    wanted, here = "0.11" if _old() else "0.15", _version("torchao")
    if not here.startswith(f"{wanted}."):
        return f"its MXFP8 is torchao {wanted}'s, and {here or 'none'} is installed"
    if backend == "interpreted" and not _old():
        return "torchtitan 0.2 sets its choice of cast in a field that torchao 0.15 does not read"
    return _unavailable(backend, device)


def _torchao(file: str, name: str) -> Recipe:
    found = load_definitions(content_dir("recipes") / file, "recipe", "RECIPES", (Recipe,))
    return next(recipe for recipe in found if recipe.name == name)


def _recipe(theirs: Recipe, recipe: str, which: str, **fields: Any) -> Recipe:
    """torchao's recipe as torchtitan converts to it, with one of the filters."""
    filters = FILTERS[which]
    how = "torchtitan's default filter" if filters is None else f"filter_fqns={list(filters)}"
    short = recipe if recipe == "mxfp8" else f"float8.{recipe}"
    return dataclasses.replace(
        theirs,
        name=f"torchtitan.{short}{which}",
        title=f"{theirs.title}; {how}",
        package="torchtitan>=0.1,<0.3",
        convert=partial(_convert, recipe=recipe, filters=filters),
        convertible=partial(_convertible, recipe=recipe, filters=filters),
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


def _mxfp8(which: str) -> Recipe:
    theirs = _torchao("torchao_mxfp8.py", "torchao.mxfp8.floor")
    return _recipe(
        theirs,
        "mxfp8",
        which,
        backends=("torch", "interpreted"),
        eager=("interpreted",),
        refusal=partial(_refusal, filters=FILTERS[which]),
        tap=_tap if _old() else theirs.tap,
        # the tensors of the torchao of 0.1 mix with DTensors in their scales, and raise
        shards=("fsdp",) if _old() else ("fsdp", "tensor"),
        converted=_converted_to_mx,
        unavailable=_of_mx,
        environment=_INTERPRETS,
        prepare=_prepare,
    )


def _shards(recipe: str) -> tuple[Literal["fsdp", "tensor", "codes"], ...]:
    """Of one scale a tensor, ``apply_tp`` communicates codes; torchao's tensors know how in torch
    2.11 and newer from 0.17 on."""
    newer = tuple(map(int, (_version("torchao") or "0.0").split(".")[:2])) >= (0, 17)
    return ("fsdp", "tensor", "codes") if recipe == "tensorwise" and newer else ("fsdp", "tensor")


RECIPES = [
    *map(_mxfp8, FILTERS),
    *(
        _recipe(
            _torchao("torchao_float8.py", f"torchao.float8.{recipe}"),
            recipe,
            which,
            tap=_tap_float8,
            shards=_shards(recipe),
        )
        for recipe in ("tensorwise", "rowwise")
        for which in ("", ".partial")
    ),
]
