"""torchao blockwise FP8 training linear (DeepSeek-V3's granularity): E4M3, fp32 scales.

Plan from torchao 0.18 ``prototype/blockwise_fp8_training/linear.py`` fp8_blockwise_mm:

    input, grad_output   one scale for 128 elements along the contracted axis
    weight               one scale for each 128 x 128 square

The quantisers (``kernels.py``) are Triton only. On a CPU Triton's interpreter runs them, repaired
(harness/triton_on_cpu: their codes and scales are those of an H200), if Triton is added to the
environment: ``--with triton==3.6.0``. The module also holds torch versions of them, with which
tests/numerics compares our reference. Backends:

    scaled_mm  torch.nn.functional.scaled_mm with block scales, for which a CPU has no kernel
    triton     the library's own GEMM kernels (``use_triton``)
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import E4M3FN
from narrowfuzz.numerics.plan import Fp32Scale, GemmPlan, OperandPlan, Plan
from narrowfuzz.recipe.recipe import Emit, Recipe, every_linear

#: Does Triton's interpreter run the kernels? No compiler sees into it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK = 128
_SCALE = Fp32Scale(eps=1e-12, power_of_two=False)
_RUN = OperandPlan(E4M3FN, "block", BLOCK, _SCALE)
_SQUARE = OperandPlan(E4M3FN, "tile", BLOCK, _SCALE)
# two stored reciprocals, and two multiplications of each block's partial sum by them
_WITH_WEIGHT = GemmPlan(_RUN, _SQUARE, scale_roundings=4)
_PLAN = Plan(
    {
        "output": _WITH_WEIGHT,
        "grad_input": _WITH_WEIGHT,
        "grad_weight": GemmPlan(_RUN, _RUN, scale_roundings=4),
    }
)


def _convert(model: Any, spec: Spec, *, only: tuple[str, ...] = ()) -> Any:
    from narrowfuzz.recipe.recipe import named
    from torch import nn

    on_cpu = not next(model.parameters()).is_cuda
    if on_cpu:
        import triton_on_cpu

        triton_on_cpu.install_torchao()
    from torchao.prototype.blockwise_fp8_training import kernels, linear
    from torchao.prototype.blockwise_fp8_training.linear import (
        Float8BlockwiseLinear,
        Float8BlockwiseLinearConfig,
    )
    from torchao.quantization import quantize_

    def is_linear(module: Any, name: str) -> bool:
        return isinstance(module, nn.Linear) and named(name, only)

    if on_cpu:
        linear.is_sm_at_least_90 = lambda: True
    for kernel in vars(kernels).values():
        # all have the same tile along K; to try each takes a minute a shape, and the interpreter is
        # slow for many programs
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[-1:] if on_cpu else kernel.configs[:1]
    quantize_(model, Float8BlockwiseLinearConfig(), is_linear)
    for module in model.modules():
        if isinstance(module, Float8BlockwiseLinear):
            module.use_triton = spec.backend == "triton"
    return model


def _converted(module: Any) -> bool:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    return isinstance(module, Float8BlockwiseLinear)


@contextmanager
def _tap(emit: Emit) -> Iterator[None]:
    """Stand in front of the one function through which both backends multiply.

    It takes B^T with its scales transposed likewise; only grad_weight passes the scales of B
    itself, recognised by the second scale tensor for Triton, which no other product has.
    """
    from torchao.prototype.blockwise_fp8_training import linear

    multiply = linear._run_blockwise_mm

    def watch(**kw: Any) -> Any:
        b_scale = kw["scale_b"] if kw.get("triton_scale_b") is not None else kw["scale_b"].t()
        emit(kw["mat_a"], kw["scale_a"], kw["mat_b"].t(), b_scale)
        return multiply(**kw)

    linear._run_blockwise_mm = watch
    try:
        yield
    finally:
        linear._run_blockwise_mm = multiply


def _refusal(spec: Spec, device: str) -> str:
    if spec.bias:
        return "bias must be absent: Float8BlockwiseLinear does not support it"
    for name, size in (("in_features", spec.k), ("out_features", spec.n), ("tokens", spec.tokens)):
        if size % BLOCK:
            return f"{name} must be a multiple of {BLOCK}, the block, got {size}"
    return ""


def _unavailable(backend: str, device: str) -> str:
    there = importlib.util.find_spec("triton") is not None
    if device == "cpu" and not (there and INTERPRETED):
        return "quantises with Triton kernels: needs a GPU, or --with triton==3.6.0 on a CPU"
    if device == "cpu":
        return "torch has no kernel for block scales on a CPU" if backend == "scaled_mm" else ""
    if device != "cuda":
        return "quantises with Triton kernels: needs a real GPU, or a CPU"
    if not there:
        return "quantises with Triton kernels: needs triton"
    import torch

    if torch.cuda.get_device_capability() < (9, 0):
        return "Float8BlockwiseLinear asserts compute capability 9.0"
    return ""


RECIPES = [
    Recipe(
        name="torchao.blockwise_fp8",
        family="torchao.blockwise_fp8",
        title="1x128 blocks, 128x128 for the weight, E4M3, fp32 scales",
        backends=("scaled_mm", "triton"),
        backend_words={
            "scaled_mm": "torch.nn.functional.scaled_mm multiplies the blocks",
            "triton": "the library's own kernels multiply the blocks"
            + (", in Triton's interpreter" if INTERPRETED else ""),
        },
        eager=("triton",) if INTERPRETED else (),
        environment={"TRITON_INTERPRET": "1"} if INTERPRETED else {},
        package="torchao>=0.18",
        plan=lambda spec: _PLAN,
        convert=_convert,
        refusal=_refusal,
        tap=_tap,
        inverse_scales=True,
        unavailable=_unavailable,
        converted=_converted,
        convertible=every_linear,
        alignment=BLOCK,
        dtypes=("bf16",),
        leaves_out=dict.fromkeys(
            ("dtype=fp16", "dtype=fp32"), "Float8BlockwiseLinear.supported_dtypes is [bfloat16]"
        ),
    )
]
