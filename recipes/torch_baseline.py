"""The baselines: a plain nn.Linear in fp32, bf16 and fp16. Nothing is quantised; nothing may be
found."""

from __future__ import annotations

from typing import Any

from narrowfuzz.case import Dtype, Spec
from narrowfuzz.numerics.plan import HIGH_PRECISION, ROLES, GemmPlan, Plan
from narrowfuzz.recipe import (
    ROUNDED,
    Recipe,
    converts_nothing,
    promises_nothing,
)

# fp32 products round once more than the sum; narrower ones are exact in the fp32 accumulator.
_FP32 = Plan(
    {role: GemmPlan(HIGH_PRECISION, HIGH_PRECISION, scale_roundings=1) for role in ROLES},
    bias="either",
)
_NARROW = Plan(
    {role: GemmPlan(HIGH_PRECISION, HIGH_PRECISION, scale_roundings=0) for role in ROLES},
    bias="either",
)


def _keep(model: Any, spec: Spec) -> Any:
    return model


def _never_refuses(spec: Spec, device: str) -> str:
    return ""


def _recipe(dtype: Dtype, plan: Plan) -> Recipe:
    return Recipe(
        name=f"torch.{dtype}",
        family="torch",
        title=f"plain nn.Linear, {dtype} parameters",
        backends=("native",),
        package="",
        dtypes=(dtype,),
        plan=lambda spec: plan,
        convert=_keep,
        refusal=_never_refuses,
        autocast=lambda device: ROUNDED,
        leaves_out={
            f"dtype={other}": f"torch.{other} takes it" for other in _PLANS if other != dtype
        },
        converted=converts_nothing,
        convertible=promises_nothing,
    )


_PLANS: dict[Dtype, Plan] = {"fp32": _FP32, "bf16": _NARROW, "fp16": _NARROW}

RECIPES = [_recipe(dtype, plan) for dtype, plan in _PLANS.items()]
