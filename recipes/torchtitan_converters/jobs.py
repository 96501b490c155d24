"""The converters of torchtitan 0.1 and 0.2, which change a model.

Each is built from torchtitan's own job configuration. Two things differ from the machine that
torchtitan requires, and both are set where its converter reads them: it may run without a GPU, and
MX products are emulated (NAME_MAP has mxfp8_cublas, for which a CPU has no kernel).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from narrowfuzz.case.spec import Spec
from narrowfuzz.recipe.recipe import Emit

from .promises import unavailable_mx


def convert(
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
    from narrowfuzz.recipe.recipe import named

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
    the kernel that casts along dim1 runs once per shape, and PyTorch's cast gives the result."""
    if "torchao.prototype.mx_formats.custom_cast" in sys.modules:
        return
    import torch.utils._triton as machine
    import triton

    tune = triton.autotune
    with (
        patch.object(machine, "has_triton", lambda: True),
        # nothing is timed: the last is the largest tile
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


def prepare() -> None:
    """Import torchao with its kernels first: modules that are imported without stay without."""
    if not unavailable_mx("interpreted", "cpu"):
        _interpret()


def convertible(
    module: Any,
    name: str,
    spec: Spec,
    *,
    recipe: str,
    filters: tuple[str, ...] | None,
    only: tuple[str, ...] = (),
) -> bool:
    """As documented: linears whose dimensions are multiples of 16, except the filtered ones."""
    from narrowfuzz.recipe.recipe import named
    from torch import nn

    if not isinstance(module, nn.Linear) or any(size % 16 for size in module.weight.shape):
        return False
    left_out = ("output",) if filters is None and recipe == "mxfp8" else filters or ()
    return not any(text in name for text in left_out) and named(name, only)


def converted_to_mx(module: Any) -> bool:
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


def tap(emit: Emit) -> contextlib.AbstractContextManager[None]:
    """The MX tensor's mm, as torchao 0.11 has it: scales are a flat list."""
    from torchao.prototype.mx_formats.mx_ops import MX_OPS_TABLE

    def show(a: Any, b: Any) -> None:
        a_codes, b_codes = a._data, b._data.t()
        if a_codes.shape[1] % a._block_size == 0:
            a_scale = a._scale_e8m0.reshape(a_codes.shape[0], -1)
            emit(a_codes, a_scale, b_codes, b._scale_e8m0.reshape(b_codes.shape[0], -1))

    return _before_mm(MX_OPS_TABLE, show)


def tap_float8(emit: Emit) -> contextlib.AbstractContextManager[None]:
    """The float8 tensor's own mm, without amaxes: their order is not that of torchao 0.13."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    def show(a: Any, b: Any) -> None:
        emit(a._data, a._scale, b._data.t(), b._scale.t())

    return _before_mm(FLOAT8_OPS_TABLE, show)
