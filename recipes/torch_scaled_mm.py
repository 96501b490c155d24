"""torch's own scaled matrix multiply, without a library around it.

The layer is ``harness/narrowfuzz/arms/scaled_linear.py``: the fewest lines that train through
``torch.nn.functional.scaled_mm`` (``aten::_scaled_mm_v2``). Backends are its two fp8 scalings:

    tensorwise  one fp32 scale a tensor; input and weight E4M3, grad_output E5M2
    rowwise     one fp32 scale a row of the contracted axis; all E4M3

and the same two by ``torch._scaled_mm``, which libraries still call: ``tensorwise_v1`` and
``rowwise_v1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from narrowfuzz.case.spec import Spec
from narrowfuzz.machine.machine import machine
from narrowfuzz.numerics.formats import E4M3FN, E5M2
from narrowfuzz.numerics.plan import ROLES, Fp32Scale, GemmPlan, OperandPlan, Plan
from narrowfuzz.recipe.recipe import Emit, Recipe

ALIGNMENT = 16


def _plan(spec: Spec) -> Plan:
    scale = Fp32Scale(eps=1e-12, power_of_two=False)
    # two reciprocals and two multiplications; the kernel may add the bias before it rounds
    kw: dict[str, Any] = {"scale_roundings": 4}
    if spec.backend.startswith("rowwise"):
        row = OperandPlan(E4M3FN, "row", 0, scale)
        return Plan(dict.fromkeys(ROLES, GemmPlan(row, row, **kw)), bias="either")
    e4m3, e5m2 = (OperandPlan(f, "tensor", 0, scale) for f in (E4M3FN, E5M2))
    backward = GemmPlan(e5m2, e4m3, **kw)
    return Plan(
        {"output": GemmPlan(e4m3, e4m3, **kw), "grad_input": backward, "grad_weight": backward},
        bias="either",
    )


def _convert(model: Any, spec: Spec) -> Any:
    from narrowfuzz.arms.scaled_linear import become_scaled

    return model.apply(lambda module: become_scaled(module, spec.backend or "tensorwise"))


def _converted(module: Any) -> bool:
    from narrowfuzz.arms.scaled_linear import ScaledLinear

    return isinstance(module, ScaledLinear)


def _convertible(module: Any, name: str, spec: Spec) -> bool:
    from torch import nn

    return type(module) is nn.Linear


@contextmanager
def _tap(emit: Emit) -> Iterator[None]:
    """Stand in front of both scaled_mm: codes and inverse scales, as the kernels take them."""
    import torch
    from torch.nn import functional

    new, old = functional.scaled_mm, torch._scaled_mm

    def watch(
        a: Any, b: Any, a_scale: Any, a_kind: Any, b_scale: Any, *args: Any, **kw: Any
    ) -> Any:
        emit(a, a_scale, b.t(), b_scale.t())
        return new(a, b, a_scale, a_kind, b_scale, *args, **kw)

    def watch_old(a: Any, b: Any, a_scale: Any, b_scale: Any, **kw: Any) -> Any:
        emit(a, a_scale, b.t(), b_scale.t())
        return old(a, b, a_scale, b_scale, **kw)

    functional.scaled_mm, torch._scaled_mm = watch, watch_old
    try:
        yield
    finally:
        functional.scaled_mm, torch._scaled_mm = new, old


def _refusal(spec: Spec, device: str) -> str:
    if device == "cpu":
        return ""  # the CPU kernel takes any shape and returns either dtype
    # aten/src/ATen/native/cuda/ScaledBlas.cpp
    for name, size in (("in_features", spec.k), ("out_features", spec.n), ("tokens", spec.tokens)):
        if size % ALIGNMENT:
            return f"{name} must be a multiple of {ALIGNMENT} for scaled_mm on CUDA, got {size}"
    if spec.backend.startswith("rowwise") and spec.dtype != "bf16" and not _rows_by_cublas():
        return f"rowwise scaled_mm on CUDA only supports bf16 results, got {spec.dtype}"
    return ""


@cache
def _rows_by_cublas() -> bool:
    """cuBLASLt has rowwise kernels, which return fp16 and fp32 as well: on Hopper since CUDA 12.9.
    A machine without CUDA counts as one that has them."""
    import torch

    if not torch.cuda.is_available():
        return True
    version = tuple(int(part) for part in (torch.version.cuda or "99.0").split(".")[:2])
    return torch.cuda.get_device_capability()[0] == 9 and version >= (12, 9)


@cache
def _not_public() -> str:
    """Why F.scaled_mm does not multiply ordinary matrices on a CPU, "" if it does: torch 2.11 has
    it for GPUs only."""
    import torch
    import torch.nn.functional as F

    a, one = torch.ones(ALIGNMENT, ALIGNMENT).to(torch.float8_e4m3fn), torch.ones(())
    kind = F.ScalingType.TensorWise
    try:
        F.scaled_mm(a, a.t(), one, kind, one, kind)
    except RuntimeError as error:
        return f"scaled_mm has no kernel for CPUs: {str(error).split('. ')[0]}"
    return ""


def _unavailable(backend: str, device: str) -> str:
    """Not every CPU has kernels for both scalings, and not every torch has both operators."""
    if device != "cpu":
        return ""
    lacks = machine().without("fp8_rowwise" if backend.startswith("rowwise") else "fp8")
    return lacks or ("" if backend.endswith("_v1") else _not_public())


RECIPES = [
    Recipe(
        name="torch.scaled_mm",
        family="torch.scaled_mm",
        title="scaled_mm and _scaled_mm in a plain float8 linear, fp32 scales",
        backends=("tensorwise", "rowwise", "tensorwise_v1", "rowwise_v1"),
        backend_words={
            "tensorwise": "F.scaled_mm, one scale a tensor",
            "rowwise": "F.scaled_mm, one scale a row",
            "tensorwise_v1": "torch._scaled_mm, one scale a tensor",
            "rowwise_v1": "torch._scaled_mm, one scale a row",
        },
        package="",
        plan=_plan,
        convert=_convert,
        refusal=_refusal,
        unavailable=_unavailable,
        tap=_tap,
        inverse_scales=True,
        functional=True,
        converted=_converted,
        convertible=_convertible,
        dtypes=("bf16", "fp32", "fp16"),
        leaves_out={"autocast=True": "the layer is ours, and made without autocast"},
    )
]
