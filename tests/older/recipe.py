"""A user's recipe that takes nothing but the public names of 0.1.0: it loads without a word."""

from __future__ import annotations

from typing import Any

from narrowfuzz import E4M3FN, Fp32Scale, GemmPlan, OperandPlan, Plan, Recipe, Spec, every_linear


def _plan(spec: Spec) -> Plan:
    row = OperandPlan(E4M3FN, "row", 0, Fp32Scale(eps=1e-12, power_of_two=False))
    gemm = GemmPlan(row, row, scale_roundings=4)
    return Plan({"output": gemm, "grad_input": gemm, "grad_weight": gemm}, bias="either")


def _convert(model: Any, spec: Spec) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))


def _converted(module: Any) -> bool:
    return type(module).__name__ == "Float8Linear"


def _refusal(spec: Spec, device: str) -> str:
    return ""


RECIPES = [
    Recipe(
        name="mine.rowwise",
        family="torchao.float8",
        title="my rowwise float8",
        backends=("real",),
        package="torchao",
        plan=_plan,
        convert=_convert,
        refusal=_refusal,
        converted=_converted,
        convertible=every_linear,
        based_on="torchao.float8.rowwise",
        leaves_out={"dtype=fp16": "it is trained in bf16"},
    )
]
