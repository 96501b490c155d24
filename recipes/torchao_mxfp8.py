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
            quantize_(model, MXFP8TrainingOpConfig(**kw), lambda module, name: name == "proj")
            return model
        old = model.proj
        linear = MXFP8Linear(
            old.in_features, old.out_features, old.bias is not None, dtype=old.weight.dtype, **kw
        )
        linear.load_state_dict(old.state_dict())
        model.proj = linear
        return model

    return convert


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
            convert = (
                f"quantize_(model, MXFP8TrainingOpConfig({kw}), "
                'lambda m, name: name == "proj") or model'
            )
        else:
            imports += "from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear"
            convert = (
                "torch.nn.Sequential(collections.OrderedDict(proj=MXFP8Linear("
                "*model.proj.weight.t().shape, model.proj.bias is not None, "
                f"dtype=dtype, {kw})))"
            )
        return ScriptText(
            imports=imports,
            convert=convert,
            tap="multiply = mx_tensor._addmm_mx_dispatch\n"
            "def watch(a, b, aten_op, bias=None):\n"
            "    seen.append((a.qdata, a.scale, b.qdata.t(), b.scale.t()))\n"
            "    return multiply(a, b, aten_op, bias)\n"
            "mx_tensor._addmm_mx_dispatch = watch",
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
        alignment=BLOCK,
    )
    for mode in ("floor", "rceil")
]
