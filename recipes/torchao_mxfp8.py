"""torchao MXFP8 training linears: 1x32 blocks along the contracted axis, E8M0 scales.

Plans follow torchao 0.18 ``mx_formats/mx_tensor.py`` and ``moe_training/mxfp8_linear.py``. One
recipe for each ScaleCalculationMode, and ``rceil_wgrad_with_hp``, as MXFP8TrainingRecipe names it,
whose grad_weight is not quantised (mx_mm.backward, ``wgrad_with_hp``). Backends:

    linear    the MXFP8Linear module, emulated: operands dequantised to the layer's dtype
    wrapper   the same through quantize_(model, MXFP8TrainingOpConfig(...)), which swaps the
              weight's tensor class
    native    MXFP8Linear with KernelPreference.AUTO, its default: Triton and CUDA casts (floor and
              rceil only, bf16 only) and cuBLAS's MX GEMM, which always returns bf16
    triton    the same on a CPU, if Triton is added (``--with triton==3.6.0``): Triton's
              interpreter casts, along dim 1 by the library's Triton kernel in place of its CUDA
              one, and harness/triton_on_cpu multiplies codes and tiled scales

Older releases: MXLinear is the module until 0.16, and has only the floor mode before 0.13; 0.17
has no module, and is the first whose wrapper takes linears. Each has been read for its plans.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import E4M3FN
from narrowfuzz.numerics.plan import HIGH_PRECISION, ROLES, GemmPlan, MxScale, OperandPlan, Plan
from narrowfuzz.numerics.scales import MxMode
from narrowfuzz.recipe.recipe import NOT_ROUNDED, Emit, Recipe, installed
from packaging.version import Version

BLOCK = 32
#: Does Triton's interpreter run the kernels?
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: triton_to_mxfp8_dim1 takes multiples of this size.
TILE = 128
#: NEWEST: the newest release whose names are used here. RELEASE: the installed one, or NEWEST.
NEWEST = Version("0.18")
RELEASE = installed("torchao", str(NEWEST))
#: The release has the module MXLinear, not MXFP8Linear.
HAS_MXLINEAR = Version("0.17") > RELEASE


@dataclass(frozen=True)
class _Variant:
    """The settings in which the MXFP8 recipes differ."""

    name: str
    mode: MxMode
    #: The scale byte of a block with an Inf since torchao 0.10 (OCP MX v1.0 leaves it to
    #: implementations); 0.9 takes logarithms, and the byte is the largest one.
    inf_byte: int
    wgrad_with_hp: bool = False

    @property
    def backends(self) -> tuple[str, ...]:
        # utils.py _to_mxfp8_dim1_kernel_wrapper: the kernels know these two modes
        native = ("native", "triton") if self.mode in ("floor", "rceil") else ()
        return ("linear", "wrapper", *native)

    @property
    def title(self) -> str:
        hp = ", grad_weight in high precision" if self.wgrad_with_hp else ""
        return f"1x32 E4M3 blocks, E8M0 scales by {self.mode}{hp}"


VARIANTS = (
    _Variant("floor", "floor", 247),
    _Variant("rceil", "rceil", 254),
    _Variant("ceil", "ceil", 247),
    _Variant("even", "even", 247),
    _Variant("rceil_wgrad_with_hp", "rceil", 254, wgrad_with_hp=True),
)


def _plan(variant: _Variant) -> Any:
    def plan(spec: Spec) -> Plan:
        inf_byte = variant.inf_byte if Version("0.10") <= RELEASE else 254
        operand = OperandPlan(E4M3FN, "block", BLOCK, MxScale(variant.mode, inf_byte))
        if spec.backend in ("native", "triton"):
            gemm = GemmPlan(operand, operand, scale_roundings=0, rounding=("bf16", "out"))
        else:
            # the compiler may fuse multiply and bias into addmm: no rounding is the kernel's own
            gemm = GemmPlan(
                operand, operand, scale_roundings=0, kernel_rounds=False, dequantise_to="dtype"
            )
        gemms = dict.fromkeys(ROLES, gemm)
        if variant.wgrad_with_hp:
            # torch.mm of the layer's dtype: fp32 products round, bf16 products are exact
            gemms["grad_weight"] = GemmPlan(
                HIGH_PRECISION, HIGH_PRECISION, scale_roundings=1 if spec.dtype == "fp32" else 0
            )
        return Plan(gemms)

    return plan


def _convert(
    model: Any, spec: Spec, *, mode: str, wgrad_with_hp: bool, only: tuple[str, ...] = ()
) -> Any:
    if spec.backend == "triton":
        _interpret()
    from narrowfuzz.recipe.recipe import named
    from torch import nn
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    native = spec.backend in ("native", "triton")
    kw: dict[str, Any] = {
        "kernel_preference": KernelPreference.AUTO if native else KernelPreference.EMULATED,
        "scale_calculation_mode": ScaleCalculationMode(mode),
        "wgrad_with_hp": wgrad_with_hp,
    }
    if spec.backend == "wrapper":
        pads = "pad_token_groups_for_grouped_mm"
        if spec.sharding.experts and hasattr(MXFP8TrainingOpConfig, pads):
            kw[pads] = True  # ranks that share experts receive any number of rows
        quantize_(
            model,
            MXFP8TrainingOpConfig(**kw),
            lambda module, name: _wrapped(module, name) and named(name, only),
        )
        return model
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    for name, module in model.named_modules():
        if type(module) is nn.Linear and named(name, only):
            # torchao has no conversion to MXFP8Linear; ours changes nothing but the class
            module.__class__ = MXFP8Linear
            vars(module).update(kw)
    return model


def _convert_to_mxlinear(
    model: Any, spec: Spec, *, mode: str, wgrad_with_hp: bool, only: tuple[str, ...] = ()
) -> Any:
    from narrowfuzz.recipe.recipe import named
    from torch import nn
    from torchao.prototype.mx_formats.config import MXLinearConfig
    from torchao.prototype.mx_formats.mx_linear import MXLinear

    assert not wgrad_with_hp
    config = MXLinearConfig()  # E4M3 in blocks of 32, emulated
    if mode != "floor":
        from torchao.prototype.mx_formats.config import ScaleCalculationMode

        config.scale_calculation_mode = ScaleCalculationMode(mode)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and named(name, only):
            MXLinear.from_float(module, config=config)
    return model


def _interpret() -> None:
    """Let Triton cast along dim 1, and this CPU multiply, for the rest of the process."""
    import triton_on_cpu

    triton_on_cpu.install_torchao()
    from types import SimpleNamespace

    from torchao.prototype.moe_training import mxfp8_linear
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Choice
    from triton_on_cpu.memory import use_poisoned_torch
    from triton_on_cpu.products import mx_scaled_mm

    mxfp8_linear.MXFP8Dim1CastKernelChoice = SimpleNamespace(
        CUDA=Choice.TRITON, TRITON=Choice.TRITON, TORCH=Choice.TORCH
    )
    use_poisoned_torch(mx_tensor, _scaled_mm=mx_scaled_mm)


def _convertible(module: Any, name: str, spec: Spec, *, only: tuple[str, ...] = ()) -> bool:
    from narrowfuzz.recipe.recipe import named
    from torch import nn

    kind = _wrapped(module, name) if spec.backend == "wrapper" else type(module) is nn.Linear
    return kind and named(name, only)


def _wrapped(module: Any, name: str) -> bool:
    """True for what quantize_'s default filter takes (quant_api.py _is_linear: not
    MultiheadAttention's out_proj), and for experts, by name, as in moe_training/README.md."""
    from torch import nn

    exempt = nn.modules.linear.NonDynamicallyQuantizableLinear
    linear = isinstance(module, nn.Linear) and not isinstance(module, exempt)
    return linear or (name.rpartition(".")[2] == "experts" and _stacked(module))


def _stacked(module: Any) -> bool:
    """Are its own parameters stacks of matrices, one for each expert, and nothing else?"""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.ndim == 3 for parameter in own)


def _converted(module: Any) -> bool:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    return isinstance(module, MXFP8Linear) or _has_wrapped(module)


def _has_wrapped(module: Any) -> bool:
    from torch import nn
    from torchao.prototype.moe_training.tensor import TrainingWeightWrapperBaseTensor

    own = dict(module.named_parameters(recurse=False))
    wrapped = {n for n, p in own.items() if isinstance(p, TrainingWeightWrapperBaseTensor)}
    # a weight that is computed, as by weight_norm, is not wrapped where what it is made of is
    return (
        "weight" in wrapped if isinstance(module, nn.Linear) else bool(wrapped) and _stacked(module)
    )


def _is_mxlinear(module: Any) -> bool:
    from torchao.prototype.mx_formats.mx_linear import MXLinear

    return isinstance(module, MXLinear)


@cache
def _not_wrapped() -> str:
    """Why torchao wraps no weight here, "" if it does. It asserts parts of torch that 2.11 lacks
    (moe_training/conversion_utils.py). It is tried only before torch 2.13, which is known to have
    them: trying imports all of it."""
    import torch
    from packaging.version import Version
    from torch import nn

    if Version(torch.__version__) >= Version("2.13"):
        return ""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
    try:
        quantize_(nn.Linear(BLOCK, BLOCK, device="meta"), config)
    except AssertionError as error:
        return f"torchao wraps no weight on torch {torch.__version__}: {error}"
    return ""


def _lacks(variant: _Variant, backend: str) -> str:
    """The part that a backend needs and an older release lacks, "" if there is none."""
    if NEWEST <= RELEASE:
        return ""
    if not HAS_MXLINEAR:
        return "" if backend == "wrapper" else f"torchao {RELEASE} has but a wrapper of weights"
    if backend != "linear" or variant.wgrad_with_hp:
        return f"torchao {RELEASE} has MXLinear alone, which quantises all three products"
    by_floor = variant.mode == "floor" or Version("0.13") <= RELEASE
    return "" if by_floor else f"torchao {RELEASE} scales by floor alone"


def _unavailable(backend: str, device: str, *, variant: _Variant) -> str:
    if lacks := _lacks(variant, backend):
        return lacks
    if backend == "wrapper":
        return _not_wrapped()
    if backend == "triton":
        there = importlib.util.find_spec("triton") is not None and INTERPRETED
        if device == "cpu" and there:
            return ""
        if device == "cpu":
            return "casts with Triton kernels, which without a GPU need --with triton==3.6.0"
        return "is what a CPU has in place of native, the backend of a GPU"
    if backend != "native":
        return ""
    import torch

    if device != "cuda":
        return (
            "KernelPreference.AUTO casts with CUDA kernels and multiplies with cuBLAS: needs a GPU"
        )
    if torch.cuda.get_device_capability() < (10, 0):
        return "cuBLAS multiplies MXFP8 from compute capability 10.0 on"
    return ""


@contextmanager
def _tap(emit: Emit) -> Iterator[None]:
    """Stand in front of the MX tensor's mm: both operands arrive with codes and E8M0 bytes."""
    place, name = _multiplies()
    multiply = place[name]

    def watch(*args: Any, **kw: Any) -> Any:
        # before 0.12: the operator, and the operands as a tuple
        a, b, *_ = args[1] if isinstance(args[1], tuple) else args
        if all(hasattr(t, "qdata") or hasattr(t, "_data") for t in (a, b)):
            emit(*_seen(a, transposed=False), *_seen(b, transposed=True))
        return multiply(*args, **kw)

    place[name] = watch
    try:
        yield
    finally:
        place[name] = multiply


def _multiplies() -> tuple[dict[Any, Any], Any]:
    """The namespace that holds torchao's function that multiplies, and its key there."""
    import torch
    from torchao.prototype.mx_formats import mx_tensor

    name = "_addmm_mx_dispatch"
    if hasattr(mx_tensor, name):
        return vars(mx_tensor), name
    from torchao.prototype.mx_formats import mx_ops  # until 0.13

    if hasattr(mx_ops, name):
        return vars(mx_ops), name
    return mx_ops.MX_OPS_TABLE, torch.ops.aten.mm.default  # until 0.11


def _seen(t: Any, *, transposed: bool) -> tuple[Any, Any]:
    """Codes and scales of an operand as it was quantised, row by row."""
    codes = t.qdata if hasattr(t, "qdata") else t._data
    codes = codes.t() if transposed else codes
    if hasattr(t, "_scale_e8m0"):  # before 0.15 scales are not transposed with the codes
        return codes, t._scale_e8m0.reshape(codes.shape[0], -1)
    return codes, t.scale.t() if transposed else t.scale


@contextmanager
def _tap_interpreted(emit: Emit) -> Iterator[None]:
    """The same, if Triton's interpreter runs the kernels: torchao must be imported in a way that
    lets it, unless a conversion has imported torchao before."""
    import sys

    import triton_on_cpu

    if "torchao.prototype.mx_formats.kernels" not in sys.modules:
        triton_on_cpu.install_torchao()
    with _tap(emit):
        yield


def _refusal(variant: _Variant) -> Any:
    def refusal(spec: Spec, device: str) -> str:
        contracted = [("in_features", spec.k), ("out_features", spec.n)]
        if not variant.wgrad_with_hp:
            contracted.append(("tokens", spec.tokens))
        for name, size in contracted:
            if size % BLOCK:
                return f"{name} must be a multiple of {BLOCK}, the MX block, got {size}"
        if spec.backend in ("native", "triton") and spec.dtype != "bf16":
            return f"dtype must be bf16 for the native kernels, got {spec.dtype}"
        for name, size in contracted if spec.backend == "triton" else ():
            if size % TILE:
                return f"{name} must be a multiple of {TILE} for the Triton casts, got {size}"
        return ""

    return refusal


_EMULATED = "torchao emulates its product in PyTorch"

if HAS_MXLINEAR:
    _CONVERT, _CONVERTED = _convert_to_mxlinear, _is_mxlinear
else:
    _CONVERT, _CONVERTED = _convert, _has_wrapped if NEWEST > RELEASE else _converted

RECIPES = [
    Recipe(
        name=f"torchao.mxfp8.{variant.name}",
        family="torchao.mxfp8",
        title=variant.title,
        backends=variant.backends,
        backend_words={
            "linear": f"MXFP8Linear; {_EMULATED}",
            "wrapper": f"quantize_ with MXFP8TrainingOpConfig; {_EMULATED}",
            "native": "MXFP8Linear with the GPU's own casts and MX products",
            "triton": "MXFP8Linear with Triton's casts, in Triton's interpreter; the product "
            "of codes is emulated",
        },
        eager=("triton",),
        environment={"TRITON_INTERPRET": "1"} if INTERPRETED else {},
        package="torchao>=0.9",
        plan=_plan(variant),
        convert=partial(_CONVERT, mode=variant.mode, wgrad_with_hp=variant.wgrad_with_hp),
        refusal=_refusal(variant),
        tap=_tap_interpreted if INTERPRETED else _tap,
        converted=_CONVERTED,
        convertible=_convertible,
        shards=("fsdp", "tensor"),
        unavailable=partial(_unavailable, variant=variant),
        alignment=BLOCK,
        multiples={"triton": TILE},
        autocast=lambda device: NOT_ROUNDED,  # mx_mm has no custom_fwd: its inputs are not cast
        leaves_out={"dtype=fp16": "mx_tensor.py to_mx asserts bf16 or fp32"},
    )
    for variant in VARIANTS
]
