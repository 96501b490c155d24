"""torchao float8 training linears: every recipe by name, on the real and the emulated GEMM.

Plans follow torchao 0.18 ``float8/config.py``, ``float8_utils.py``, ``float8_ops.py``:

    tensorwise  one scale a tensor; input and weight E4M3, grad_output E5M2; fp32 scales
    rowwise     one scale a row of the contracted axis; all E4M3; scales rounded down to 2^k
    rowwise_gw_hp  output as rowwise; grad_input with one power-of-two scale for the whole weight;
                grad_weight not quantised (Float8LinearRecipeName.ROWWISE_WITH_GW_HP)

``real`` is torch._scaled_mm: rowwise always leaves the kernel in bf16 (fp32 layers too), and its
two backward GEMMs run on unit scales and are rescaled afterwards. ``emulated`` multiplies
dequantised fp32 operands and rounds once.

Older releases, from 0.9 on: before 0.12 rowwise leaves the kernel in the layer's dtype. Before 0.13
tensorwise casts a weight before its input, and rowwise_gw_hp rounds no scale to a power of two: its
``real`` backend, where a result is rounded before such a scale is applied, has no plan here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from narrowfuzz.case.spec import Spec, TensorName
from narrowfuzz.machine.machine import machine
from narrowfuzz.numerics.formats import E4M3FN, E5M2
from narrowfuzz.numerics.plan import (
    HIGH_PRECISION,
    ROLES,
    Fp32Scale,
    GemmPlan,
    OperandPlan,
    Plan,
)
from narrowfuzz.recipe.recipe import Emit, Recipe, every_linear, installed
from packaging.version import Version

EPS = 1e-12


#: The release that the plans describe: the installed one, or the newest known.
RELEASE = installed("torchao", "0.18")
BEFORE_0_12 = Version("0.12") > RELEASE
BEFORE_0_13 = Version("0.13") > RELEASE


_SCALE = Fp32Scale(eps=EPS, power_of_two=False)
_POW2 = Fp32Scale(eps=EPS, power_of_two=True)


def _tensorwise(spec: Spec) -> Plan:
    e4m3 = OperandPlan(E4M3FN, "tensor", 0, _SCALE)
    e5m2 = OperandPlan(E5M2, "tensor", 0, _SCALE)
    # real: two reciprocals and two multiplications; emulated: two quotients and one product
    emulated = _emulates(spec)
    kw: dict[str, Any] = {
        "scale_roundings": 3 if emulated else 4,
        "kernel_rounds": not emulated,
        "dequantise_to": "fp32" if emulated else "",
    }
    return Plan(
        {
            "output": GemmPlan(e4m3, e4m3, fast=True, **kw),
            "grad_input": GemmPlan(e5m2, e4m3, **kw),
            "grad_weight": GemmPlan(e5m2, e4m3, **kw),
        }
    )


def _rowwise(spec: Spec) -> Plan:
    row = OperandPlan(E4M3FN, "row", 0, _POW2)
    if _emulates(spec):
        gemm = GemmPlan(row, row, scale_roundings=0, kernel_rounds=False, dequantise_to="fp32")
        return Plan(dict.fromkeys(ROLES, gemm))
    kw: dict[str, Any] = {"rounding": ("out",) if BEFORE_0_12 else ("bf16", "out")}
    forward = GemmPlan(row, row, scale_roundings=0, fast=True, **kw)
    backward = GemmPlan(row, row, scale_roundings=0, post_scale=True, **kw)
    return Plan({"output": forward, "grad_input": backward, "grad_weight": backward})


def _rowwise_gw_hp(spec: Spec) -> Plan:
    # float8_ops.py preprocess_addmm repeats the weight's one scale along its axis, so grad_input
    # takes rowwise's path and rounds to bf16 before it is rescaled
    rowwise = _rowwise(spec).gemms
    output, grad_input = rowwise["output"], rowwise["grad_input"]
    if BEFORE_0_13:  # emulated alone: two quotients and one product
        row = OperandPlan(E4M3FN, "row", 0, _SCALE)
        output = grad_input = dataclasses.replace(output, a=row, b=row, scale_roundings=3)
    tensor = OperandPlan(E4M3FN, "tensor", 0, _SCALE if BEFORE_0_13 else _POW2)
    # fp32 products round once; narrower ones are exact in the fp32 accumulator
    plain = GemmPlan(
        HIGH_PRECISION, HIGH_PRECISION, scale_roundings=1 if spec.dtype == "fp32" else 0
    )
    return Plan(
        {
            "output": output,
            "grad_input": dataclasses.replace(grad_input, b=tensor),
            "grad_weight": plain,
        }
    )


def _convert(model: Any, spec: Spec, *, recipe: str, only: tuple[str, ...] = ()) -> Any:
    from narrowfuzz.recipe.recipe import named
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=_emulates(spec))
    if spec.sharding.gathers != "values":
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    chosen = (lambda module, name: named(name, only)) if only else None
    return convert_to_float8_training(model, config=config, module_filter_fn=chosen)


def _converted(module: Any) -> bool:
    from torchao.float8.float8_linear import Float8Linear

    return isinstance(module, Float8Linear)


@contextmanager
def _tap(emit: Emit) -> Iterator[None]:
    """Stand in front of the float8 tensor's own mm: operands arrive with codes and scales.

    The amaxes of the two operands are what the two latest calls of ``tensor_to_amax`` returned. If
    there were fewer than two since the previous mm, an operand was reused, and they are unknown.
    """
    import threading

    import torch
    from torchao.float8 import float8_ops, float8_utils

    table, op = float8_ops.FLOAT8_OPS_TABLE, torch.ops.aten.mm.default
    multiply, to_amax = table[op], float8_utils.tensor_to_amax
    of_threads: dict[int, list[Any]] = {}  # ranks may be threads

    def watch_amax(*args: Any, **kwargs: Any) -> Any:
        amax = to_amax(*args, **kwargs)
        of_threads.setdefault(threading.get_ident(), []).append(amax)
        return amax

    def watch(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
        amaxes = of_threads.pop(threading.get_ident(), [])[-2:]
        a, b = args
        if not (hasattr(a, "_data") and hasattr(b, "_data")):
            return multiply(aten_op, args, kwargs)  # torchao refuses it, in a second derivative
        known: tuple[Any, ...] = ()
        # amaxes of distributed tensors are not those of a and b, which are this rank's
        if len(amaxes) == 2 and not any(hasattr(amax, "placements") for amax in amaxes):
            # a 3-D input's amax is [batch, m, 1], its scale [batch * m, 1]
            known = (
                amaxes[0].reshape(a._scale.shape),
                (amaxes[1].t() if amaxes[1].ndim == 2 else amaxes[1]).reshape(b._scale.t().shape),
            )
        emit(a._data, a._scale, b._data.t(), b._scale.t(), *known)
        return multiply(aten_op, args, kwargs)

    table[op], float8_utils.tensor_to_amax = watch, watch_amax
    try:
        yield
    finally:
        table[op], float8_utils.tensor_to_amax = multiply, to_amax


@contextmanager
def _tap_without_amax(emit: Emit) -> Iterator[None]:
    """The same without amaxes, if a weight is cast before its input, and once for two products:
    which amax belongs to which operand is unknown."""

    def codes(a: Any, a_scale: Any, b: Any, b_scale: Any, *amax: Any) -> None:
        emit.take(a, a_scale, b, b_scale, None, None)

    with _tap(dataclasses.replace(emit, take=codes)):
        yield


def _lacks(recipe: str) -> str:
    """Why this CPU cannot multiply as a recipe does, "" if it can: not every CPU has a kernel for
    one scale a tensor, and torch 2.11 has none for one a row."""
    return machine().without("fp8" if recipe.endswith("tensorwise") else "fp8_rowwise")


def _emulates(spec: Spec) -> bool:
    """True for "emulated" and, without a backend, where this CPU has no kernel for the recipe."""
    return spec.backend == "emulated" or (
        not spec.backend and bool(machine().without("fp8") or _lacks(spec.recipe))
    )


def _unavailable(backend: str, device: str, *, recipe: str) -> str:
    if BEFORE_0_13 and recipe == "rowwise_gw_hp" and backend != "emulated":
        return f"torchao {RELEASE} rounds before it applies scales that are no powers of two"
    if backend != "real" or device != "cpu":
        return ""
    return _lacks(recipe)


def _overflows(recipe: str) -> dict[str, str]:
    """Leaves out fp16 before 0.12: products of unit-scaled codes are fp16, which GPUs refuse."""
    if not BEFORE_0_12 or recipe == "tensorwise":
        return {}
    return {"dtype=fp16": "float8_ops.py: no rowwise kernel of a GPU returns fp16"}


def _autocast(device: str) -> frozenset[TensorName]:
    """float8_linear.py casts the input to the GPU's autocast dtype under the GPU's autocast only,
    and the weight never: it is quantised in its stored dtype. Autocast then makes every mm of the
    forward return its dtype (float8_ops.py autocast_to_copy), to which the bias is cast."""
    return frozenset({"bias"}) if device == "cpu" else frozenset({"input", "bias"})


def _refusal(spec: Spec, device: str) -> str:
    if device == "cpu" or _emulates(spec):
        return ""  # CPU _scaled_mm takes any shape, and the emulation too
    # aten/src/ATen/native/cuda/ScaledBlas.cpp; each of the three is contracted by some GEMM
    for name, size in (("in_features", spec.k), ("out_features", spec.n), ("tokens", spec.tokens)):
        if size % 16:
            return f"{name} must be a multiple of 16 for FP8 on CUDA, got {size}"
    return ""


RECIPES = [
    Recipe(
        name=f"torchao.float8.{name}",
        family="torchao.float8",
        title=title,
        backends=("real", "emulated"),
        backend_words={
            "real": "torch._scaled_mm multiplies the FP8 codes",
            "emulated": "torchao emulates the product in PyTorch (emulate=True)",
        },
        package="torchao>=0.9",
        plan=plan,
        convert=partial(_convert, recipe=theirs),
        refusal=_refusal,
        tap=_tap_without_amax if BEFORE_0_13 and name == "tensorwise" else _tap,
        converted=_converted,
        unavailable=partial(_unavailable, recipe=name),
        convertible=every_linear,  # swap_linear_layers: isinstance(module, nn.Linear)
        autocast=_autocast,
        dtypes=("bf16", "fp32", *(() if _overflows(name) else ("fp16",))),
        leaves_out=_overflows(name),
        # float8_linear_utils.py and fsdp_utils.py gather codes of one scale a tensor
        shards=("fsdp", "tensor", "codes") if name == "tensorwise" else ("fsdp", "tensor"),
    )
    for name, theirs, title, plan in (
        (
            "tensorwise",
            "tensorwise",
            "one fp32 scale a tensor, E4M3 forward, E5M2 gradients",
            _tensorwise,
        ),
        ("rowwise", "rowwise", "one power-of-two scale a row, E4M3 everywhere", _rowwise),
        (
            "rowwise_gw_hp",
            "rowwise_with_gw_hp",
            "rowwise; grad_weight in high precision, weight tensorwise for grad_input",
            _rowwise_gw_hp,
        ),
    )
]
