"""A recipe for a library of your own: ``fp8_linear.py`` beside this file stands for it.

    PYTHONPATH=examples/own_library narrowfuzz run --recipe-file examples/own_library/recipe.py \
        --recipe own.fp8

The plan says what the library promises; whatever differs from it is reported. If it said
``division="quotient"``, for example, scales would be: torch computes ``448.0 / amax`` as 448 times
the reciprocal of amax, which rounds twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz import E4M3FN, E5M2, Emit, Fp32Scale, GemmPlan, OperandPlan, Plan, Recipe, Spec


def plan(spec: Spec) -> Plan:
    """What each product multiplies. The rounded results are two quotients and the product."""
    scale = Fp32Scale(eps=1e-12, power_of_two=False, division="reciprocal")
    e4m3, e5m2 = (OperandPlan(f, "tensor", 0, scale) for f in (E4M3FN, E5M2))
    forward = GemmPlan(e4m3, e4m3, scale_roundings=3, dequantise_to="fp32")
    backward = GemmPlan(e5m2, e4m3, scale_roundings=3, dequantise_to="fp32")
    return Plan({"output": forward, "grad_input": backward, "grad_weight": backward})


def convert(model: Any, spec: Spec) -> Any:
    import fp8_linear

    return fp8_linear.convert(model)


def converted(module: Any) -> bool:
    from fp8_linear import Fp8Linear

    return isinstance(module, Fp8Linear)


def convertible(module: Any, name: str, spec: Spec) -> bool:
    from torch import nn

    return type(module) is nn.Linear


@contextmanager
def tap(emit: Emit) -> Iterator[None]:
    """Report the operands of each product."""
    import fp8_linear

    product = fp8_linear.product

    def reported(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: Any) -> Any:
        emit(a, a_scale, b, b_scale)
        return product(a, a_scale, b, b_scale, dtype)

    fp8_linear.product = reported
    try:
        yield
    finally:
        fp8_linear.product = product


RECIPES = [
    Recipe(
        name="own.fp8",
        family="own.fp8",
        title="our FP8 linear, one scale a tensor",
        plan=plan,
        convert=convert,
        converted=converted,
        convertible=convertible,
        tap=tap,
    )
]
