"""torchao's FP8 grouped products: all operands of all three products are quantised group by group,
with one power of two as the scale of each row along the contracted axis, and multiplied as FP8
codes.

The plan is that of torchao 0.18 ``prototype/moe_training/fp8_grouped_mm.py``; for the weight
gradient each group has its own scales. A CPU has neither the kernels, which are Triton's, nor the
product; ``triton_on_cpu`` emulates both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics import bounds, reference
from narrowfuzz.numerics.accumulator import FP32, HOPPER_FP8_FAST, Unjudged
from narrowfuzz.numerics.formats import BF16, E4M3FN, F32
from narrowfuzz.numerics.plan import GemmPlan, OperandPlan
from narrowfuzz.operators.fp8_rows import Rows, quantised, row_plan, without_nan
from narrowfuzz.operators.grouped_mm import read_quantised, rows_of_groups, title_of_quantised
from narrowfuzz.operators.operator import Deviation, Expected, Operator, Read
from narrowfuzz.trace.trace import OperatorCall

_ROW = row_plan(power_of_two=True)
_FP32_MAX = float(np.finfo(np.float32).max)
_OF = "torchao.prototype.moe_training.fp8_grouped_mm"


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    a, b, offs = named["A"], named["B_t"], named["offs"]
    if a.ndim != 2 or offs is None or named["pad_token_groups_for_grouped_mm"]:
        raise Unjudged("FP8 products of groups that are padded, or have no offsets")
    if a.dtype != b.dtype:
        raise Unjudged("FP8 products of groups of two dtypes")
    return read_quantised(named, result, {})


def _product(a: Rows, b: Rows, device: str) -> Expected:
    """A @ B^T rounded once to bf16.

    The device's accumulator errs as ``bounds.gemm_radius`` proves. Both scales are powers of two,
    and are applied to the sum one after the other, in either order: nothing is known where the
    first of them may leave fp32's range. A result below fp32's normal numbers may be flushed after
    the first scale, and the other scale multiplies that loss.
    """
    gemm = GemmPlan(_ROW, _ROW, 0, accumulator=HOPPER_FP8_FAST if device == "cuda" else FP32)
    rows, columns = a.unit[:, None], b.unit
    with np.errstate(all="ignore"):
        total = np.abs(a.values) @ np.abs(b.values).T
        least = E4M3FN.min_normal * a.unit, E4M3FN.min_normal * b.unit
        radius = bounds.gemm_radius(a.values, b.values, gemm, least, total)
        radius = radius + bounds.FLUSH32 * (rows + columns)
        one_applied = np.maximum(total / columns, total / rows)
        doubted = a.scale_uncertain[:, None] | b.scale_uncertain
        nan = (a.nan[:, None] | b.nan) & ~doubted
        centre = np.where(nan, np.nan, reference.product(a.values, b.values))
    unknown = ~nan & (doubted | ~np.isfinite(total) | (one_applied > _FP32_MAX / 2))
    return Expected.within(centre, np.where(nan, 0.0, radius), BF16, unknown)


def _expected(call: OperatorCall) -> dict[str, Expected]:
    return _by(quantised, call)


def _by(made: Callable[[F32, OperandPlan], Rows], call: OperatorCall) -> dict[str, Expected]:
    """The expected results, group by group, of operands that ``made`` quantises; nothing is known
    of rows outside all groups."""
    a, b, offs = (call.tensors[name] for name in ("input", "mat2", "offs"))
    grad = call.tensors.get("grad_output")
    shapes = {"output": call.outputs["output"].shape, "grad_input": a.shape, "grad_weight": b.shape}
    found = {name: Expected.unwritten(shapes[name]) for name in call.outputs}

    def product(left: F32, right: F32) -> Expected:
        return _product(made(left, _ROW), made(right, _ROW), call.device)

    for group, rows in rows_of_groups(offs.astype(int).tolist()):
        found["output"].put(rows, product(a[rows], b[group].T))
        if grad is not None and "grad_input" in found:
            found["grad_input"].put(rows, product(grad[rows], b[group]))
        if grad is not None and "grad_weight" in found:
            found["grad_weight"].put(group, product(a[rows].T, grad[rows].T))
    return found


def _nan_hidden(call: OperatorCall) -> Mapping[str, Expected]:
    if not any(np.isnan(x).any() for name, x in call.tensors.items() if name != "offs"):
        return {}
    return _by(without_nan, call)


OPERATOR = Operator(
    name="fp8_grouped_mm",
    words="FP8 products of groups",
    read=_read,
    expected=_expected,
    expression="fp8_grouped(input, mat2, offs, grad_output)",
    title=partial(title_of_quantised, "FP8 product of groups (rowwise)"),
    library=(f"{_OF}:_to_fp8_rowwise_then_scaled_grouped_mm",),
    gradients={"A": "grad_input", "B_t": "grad_weight"},
    results=("output", "grad_input", "grad_weight"),
    optional=("grad_output",),
    deviations=(
        Deviation(
            "fp8_grouped_nan_hidden",
            "a NaN becomes the code 448, and leaves no trace in the scale of its row",
            ("cpu", "cuda"),
            _nan_hidden,
        ),
    ),
    helper="fp8_grouped",
)
