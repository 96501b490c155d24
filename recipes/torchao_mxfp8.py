"""torchao MXFP8 training linears, emulated: 1x32 blocks along the contracted axis, E8M0 scales.

Plans follow torchao 0.18 ``mx_formats/mx_tensor.py`` and ``moe_training/mxfp8_linear.py``:
operands are dequantised to the layer's dtype and multiplied there. Two public ways in:

    linear    the MXFP8Linear module
    wrapper   quantize_(model, MXFP8TrainingOpConfig(...)), which swaps the weight's tensor class
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.case import Spec
from harness.numerics.formats import E4M3FN
from harness.numerics.plan import ROLES, GemmPlan, MxScale, OperandPlan, Plan
from harness.recipe import Emit, Recipe, ScriptText

BLOCK = 32
#: What a block with an Inf gets in torchao 0.18 (left to implementations by OCP MX v1.0).
_INF_BYTE = {"floor": 247, "rceil": 254}


def _plan(mode: str) -> Any:
    operand = OperandPlan(E4M3FN, "block", BLOCK, MxScale(mode, _INF_BYTE[mode]))  # type: ignore[arg-type]
    # the compiler may fuse the multiply and the bias into addmm, so no rounding is the kernel's own
    gemm = GemmPlan(operand, operand, scale_roundings=0, kernel_rounds=False, dequantise_to="dtype")
    plan = Plan(dict.fromkeys(ROLES, gemm))
    return lambda spec: plan


def _convert(mode: str) -> Any:
    def convert(model: Any, spec: Spec) -> Any:
        from torch import nn
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization import quantize_
        from torchao.quantization.quantize_.common import KernelPreference

        kw = {
            "kernel_preference": KernelPreference.EMULATED,
            "scale_calculation_mode": ScaleCalculationMode(mode),
        }
        if spec.backend == "wrapper":
            quantize_(model, MXFP8TrainingOpConfig(**kw))
            return model
        for module in model.modules():
            if type(module) is nn.Linear:
                # torchao has no conversion to MXFP8Linear; ours changes nothing but the class
                module.__class__ = MXFP8Linear
                vars(module).update(kw, wgrad_with_hp=False)
        return model

    return convert


def _convertible(module: Any, spec: Spec) -> bool:
    """quantize_'s default filter, quant_api.py _is_linear: not MultiheadAttention's out_proj."""
    from torch import nn

    if spec.backend != "wrapper":
        return type(module) is nn.Linear
    exempt = nn.modules.linear.NonDynamicallyQuantizableLinear
    return isinstance(module, nn.Linear) and not isinstance(module, exempt)


def _converted(module: Any) -> bool:
    from torch import nn
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.moe_training.tensor import TrainingWeightWrapperBaseTensor

    wrapped = isinstance(getattr(module, "weight", None), TrainingWeightWrapperBaseTensor)
    return isinstance(module, MXFP8Linear) or (isinstance(module, nn.Linear) and wrapped)


@contextmanager
def _tap(emit: Emit) -> Iterator[None]:
    """Stand in front of the MX tensor's mm: both operands arrive with codes and E8M0 bytes."""
    from torchao.prototype.mx_formats import mx_tensor

    from harness.arms.tensors import fp8_codes
    from harness.trace import Seen

    multiply = mx_tensor._addmm_mx_dispatch

    def watch(a: Any, b: Any, aten_op: Any, bias: Any = None) -> Any:
        emit(
            Seen(fp8_codes(a.qdata), fp8_codes(a.scale)),
            Seen(fp8_codes(b.qdata).T, fp8_codes(b.scale).T),
        )
        return multiply(a, b, aten_op, bias)

    mx_tensor._addmm_mx_dispatch = watch
    try:
        yield
    finally:
        mx_tensor._addmm_mx_dispatch = multiply


def _may_refuse(spec: Spec) -> str:
    for name, size in (("in_features", spec.k), ("out_features", spec.n), ("tokens", spec.tokens)):
        if size % BLOCK:
            return f"{name} must be a multiple of {BLOCK}, the MX block, got {size}"
    return ""


def _script(mode: str) -> Any:
    def script(spec: Spec) -> ScriptText:
        kw = (
            "kernel_preference=KernelPreference.EMULATED, "
            f"scale_calculation_mode=ScaleCalculationMode.{mode.upper()}"
        )
        imports = (
            "from torchao.prototype.mx_formats import mx_tensor\n"
            "from torchao.prototype.mx_formats.config import ScaleCalculationMode\n"
            "from torchao.quantization.quantize_.common import KernelPreference\n"
        )
        if spec.backend == "wrapper":
            imports += (
                "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig\n"
                "from torchao.quantization import quantize_"
            )
            convert = f"quantize_(model, MXFP8TrainingOpConfig({kw})) or model"
        else:
            imports += (
                "from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear\n"
                "def to_mxfp8(m):\n"
                "    if type(m) is torch.nn.Linear: m.__class__, m.__dict__ = MXFP8Linear, dict("
                f"vars(m), wgrad_with_hp=False, {kw})"
            )
            convert = "model.apply(to_mxfp8)"
        return ScriptText(
            imports=imports,
            convert=convert,
            tap="multiply = mx_tensor._addmm_mx_dispatch\n"
            "def watch(a, b, aten_op, bias=None):\n"
            "    seen.append((a.qdata, a.scale, b.qdata.t(), b.scale.t()))\n"
            "    return multiply(a, b, aten_op, bias)\n"
            "mx_tensor._addmm_mx_dispatch = watch",
            converted="type(m).__name__ == 'MXFP8Linear' or isinstance(m, torch.nn.Linear) and "
            "type(m.weight).__name__ == 'MXFP8TrainingWeightWrapperTensor'",
            convertible="isinstance(m, torch.nn.Linear) and "
            "type(m).__name__ != 'NonDynamicallyQuantizableLinear'"
            if spec.backend == "wrapper"
            else "type(m) is torch.nn.Linear",
        )

    return script


RECIPES = [
    Recipe(
        name=f"torchao.mxfp8.{mode}",
        family="torchao.mxfp8",
        title=f"1x32 E4M3 blocks, E8M0 scales by {mode}",
        backends=("linear", "wrapper"),
        package="torchao",
        plan=_plan(mode),
        convert=_convert(mode),
        may_refuse=_may_refuse,
        script=_script(mode),
        tap=_tap,
        converted=_converted,
        convertible=_convertible,
        alignment=BLOCK,
    )
    for mode in ("floor", "rceil")
]
