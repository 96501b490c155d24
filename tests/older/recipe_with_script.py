"""A user's recipe of the first days: it writes its script itself, and says may_refuse."""

from __future__ import annotations

from typing import Any

from narrowfuzz import HIGH_PRECISION, GemmPlan, OperandPlan, Plan, Recipe, ScriptText, Spec


def _plan(spec: Spec) -> Plan:
    plain = GemmPlan(OperandPlan(), OperandPlan())
    return Plan({"output": plain, "grad_input": HIGH_PRECISION, "grad_weight": HIGH_PRECISION})


def _convert(model: Any, spec: Spec) -> Any:
    return model


def _script(spec: Spec) -> ScriptText:
    return ScriptText(imports="", convert="model")


RECIPES = [
    Recipe(
        name="mine.plain",
        family="torch",
        title="nothing is quantised",
        backends=("",),
        package="",
        plan=_plan,
        convert=_convert,
        may_refuse=lambda spec: "",  # type: ignore[call-arg]
        script=_script,
    )
]
