"""torchao NVFP4 training linear: E2M1 in blocks of 16, E4M3 block scales, one fp32 tensor scale.

Plan from torchao 0.18 ``prototype/moe_training/nvfp4_training/nvfp4_linear.py`` nvfp4_mm_triton:

    output       input 1x16, weight 16x16
    grad_input   grad_output 1x16, rounded stochastically; weight 16x16
    grad_weight  both through a random Hadamard transform over the tokens; 1x16, grad_output rounded
                 stochastically

Every quantiser is a Triton kernel with Blackwell instructions. On a CPU Triton's interpreter runs
them, with these instructions emulated as PTX defines them (harness/triton_on_cpu), if Triton is
added to the environment: ``--with triton==3.6.0``; the product of codes and tiled scales, for which
a CPU has no kernel, is emulated there. torchao has ``nvfp4_quantize``, ``NVFP4Tensor`` and a
weight-only linear for a CPU, too, which tests/numerics compares with our reference.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import E2M1
from narrowfuzz.numerics.plan import GemmPlan, OperandPlan, Plan, TwoLevelScale
from narrowfuzz.recipe.recipe import MAY_CHANGE, Emit, Recipe, every_linear

#: Does Triton's interpreter run the kernels? No compiler sees into it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: nvfp4_mm_triton takes multiples of this for every dimension.
ALIGNMENT = 128
#: Fixed, so that a case is reproducible; the library draws them for each layer.
SIGNS = (1, -1, 1, 1, -1, -1, 1, -1, 1, 1, -1, 1, -1, -1, -1, 1)

_RUN = OperandPlan(E2M1, "block", 16, TwoLevelScale(eps=2.0**-6, arithmetic="encode"))
_SQUARE = replace(_RUN, granularity="tile")
_BY_CHANCE = replace(_RUN, rounding="stochastic")
# g of both operands and their product, applied to the sum of exact products of block-scaled codes;
# a block's scaled products and partial sums are rounded too
_KW: dict[str, Any] = {"scale_roundings": 5}
_PLAN = Plan(
    {
        "output": GemmPlan(_RUN, _SQUARE, **_KW),
        "grad_input": GemmPlan(_BY_CHANCE, _SQUARE, **_KW),
        "grad_weight": GemmPlan(
            replace(_BY_CHANCE, hadamard=SIGNS), replace(_RUN, hadamard=SIGNS), **_KW
        ),
    }
)


def _convert(model: Any, spec: Spec, *, only: tuple[str, ...] = ()) -> Any:
    if not next(model.parameters()).is_cuda:
        _interpret()
    from narrowfuzz.recipe.recipe import named
    from torch import nn
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig
    from torchao.quantization import quantize_

    def is_linear(module: Any, name: str) -> bool:
        return isinstance(module, nn.Linear) and named(name, only)

    quantize_(model, NVFP4TrainingConfig(rht_sign_vector=SIGNS), is_linear)
    return model


def _interpret() -> None:
    """Let Triton's interpreter run kernels, and this CPU multiply, for the rest of the process."""
    import triton_on_cpu

    triton_on_cpu.install_torchao()
    from torch.nn import functional
    from triton_on_cpu.products import nvfp4_scaled_mm

    if functional.scaled_mm.__module__ == "torch.nn.functional":
        functional.scaled_mm = nvfp4_scaled_mm


def _converted(module: Any) -> bool:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear

    return isinstance(module, NVFP4Linear)


@contextmanager
def _tap(emit: Emit) -> Iterator[None]:
    """Stand in front of scaled_mm, which gets packed codes, swizzled block scales and g.

    The amax of each g is the argument of ``per_tensor_amax_to_scale``; a weight's is recognised by
    its storage, and of its block scales each 16 equal rows belong to one row of tiles.
    """
    import torch
    from torch.nn import functional
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear as library
    from torchao.prototype.mx_formats.kernels import unpack_uint4
    from torchao.prototype.mx_formats.utils import from_blocked

    multiply, to_scale = functional.scaled_mm, library.per_tensor_amax_to_scale
    quantise_weight = library._triton_weight_quantize_2d
    amaxes: list[tuple[Any, Any]] = []
    weights: list[Any] = []

    def watch_scale(amax: Any) -> Any:
        amaxes.append((to_scale(amax), amax))
        return amaxes[-1][0]

    def watch_weight(weight: Any) -> Any:
        made = quantise_weight(weight)
        weights.append(made[-1])
        return made

    def seen(packed: Any, scales: Any) -> tuple[Any, Any]:
        amax = next(amax for g, amax in reversed(amaxes) if g is scales[1])
        codes = unpack_uint4(packed.contiguous().view(torch.uint8))
        rows, blocks = codes.shape[0], codes.shape[1] // 16
        of_blocks = from_blocked(scales[0].flatten(), rows, blocks)
        is_weight = any(w.data_ptr() == amax.data_ptr() for w in weights)
        return codes, (of_blocks[::16] if is_weight else of_blocks, amax)

    def watch(a: Any, b: Any, *args: Any, **kw: Any) -> Any:
        emit(*seen(a, kw["scale_a"]), *seen(b.t(), kw["scale_b"]))
        return multiply(a, b, *args, **kw)

    functional.scaled_mm, library.per_tensor_amax_to_scale = watch, watch_scale
    library._triton_weight_quantize_2d = watch_weight
    try:
        yield
    finally:
        functional.scaled_mm, library.per_tensor_amax_to_scale = multiply, to_scale
        library._triton_weight_quantize_2d = quantise_weight


@contextmanager
def _tap_interpreted(emit: Emit) -> Iterator[None]:
    """The same, after torchao is imported in a way that Triton's interpreter runs its kernels."""
    _interpret()
    with _tap(emit):
        yield


def _refusal(spec: Spec, device: str) -> str:
    for name, size in (("in_features", spec.k), ("out_features", spec.n), ("tokens", spec.m)):
        if size % ALIGNMENT:
            return f"{name} must be a multiple of {ALIGNMENT}, got {size}"
    return ""


def _unavailable(backend: str, device: str) -> str:
    there = importlib.util.find_spec("triton") is not None
    if device == "cpu":
        return (
            ""
            if there and INTERPRETED
            else (
                "quantises with Triton kernels: needs a GPU of compute capability 10.0, or "
                "--with triton==3.6.0 on a CPU"
            )
        )
    if device != "cuda":
        return "quantises with Triton kernels: needs a real GPU, or a CPU"
    if not there:
        return "quantises with Triton kernels: needs triton"
    import torch

    if torch.cuda.get_device_capability() < (10, 0):
        return "its Triton kernels use instructions of compute capability 10.0"
    return ""


RECIPES = [
    Recipe(
        name="torchao.nvfp4",
        family="torchao.nvfp4",
        title="E2M1 blocks of 16, two-level scale, stochastic gradients, random Hadamard",
        backends=("triton",),
        backend_words={"triton": "in Triton's interpreter; the product of codes is emulated"}
        if INTERPRETED
        else {},
        eager=("triton",) if INTERPRETED else (),
        environment={"TRITON_INTERPRET": "1"} if INTERPRETED else {},
        package="torchao>=0.18",
        plan=lambda spec: _PLAN,
        convert=_convert,
        refusal=_refusal,
        tap=_tap_interpreted if INTERPRETED else _tap,
        unavailable=_unavailable,
        converted=_converted,
        # a state dict holds the seed of its random numbers and the signs of its transform
        may_change=MAY_CHANGE | {"buffer added"},
        convertible=every_linear,
        alignment=ALIGNMENT,
        dtypes=("bf16",),
        leaves_out=dict.fromkeys(
            ("dtype=fp16", "dtype=fp32"), "nvfp4_mm_triton rounds what it gets to bf16"
        ),
    )
]
