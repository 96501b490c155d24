"""torchao's MXFP8 grouped products, emulated: both operands of all three products are quantised in
blocks of 32 along the contracted axis, dequantised to bf16 and multiplied group by group.

The plan is that of torchao 0.18 ``prototype/moe_training/mxfp8_grouped_mm.py``. The weight gradient
contracts over tokens: where torchao pads groups to 32 rows, each group begins a new block; where it
does not, the blocks are those of all tokens, so that a group's border may fall inside a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowfuzz.numerics import reference
from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import BF16, E4M3FN, F32, F64, round_to
from narrowfuzz.numerics.plan import MxScale, OperandPlan
from narrowfuzz.operators.bmm import rounding_of
from narrowfuzz.operators.grouped_mm import (
    products_of_groups,
    read_quantised,
    rows_of_groups,
    title_of_quantised,
)
from narrowfuzz.operators.operator import Expected, Operator, Read
from narrowfuzz.trace.trace import OperatorCall

_BLOCK = 32
#: The scale of a block that contains an infinity, by the scale's rule.
_INF_BYTE = {"floor": 247, "rceil": 254, "ceil": 247, "even": 247}
_OF = "torchao.prototype.moe_training.mxfp8_grouped_mm"


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    a, b = named["A"], named["B_t"]
    if named["kernel_preference"].name != "EMULATED":
        raise Unjudged("MXFP8 products of groups by kernels of a GPU")
    if named.get("bias") is not None or a.dtype != b.dtype:  # torchao 0.17 takes no bias
        raise Unjudged("MXFP8 products of groups with a bias, or of two dtypes")
    settings = {
        "mode": named["scale_calculation_mode"].name.lower(),
        "wgrad_with_hp": named["wgrad_with_hp"],
        "padded": named["pad_token_groups_for_grouped_mm"],
    }
    return read_quantised(named, result, settings)


def _dequantised(x: F32, mode: str) -> F64:
    """The rows dequantised to bf16; NaN in blocks whose scale is uncertain: byte 0, which torchao's
    bf16 does not hold, and rceil just above a power of two."""
    plan = OperandPlan(E4M3FN, "block", _BLOCK, MxScale(mode, _INF_BYTE[mode]))  # type: ignore[arg-type]
    found = reference.quantise(x, plan)
    assert found is not None
    doubted = (found.scale == 0) & (found.amax > 0)
    other = reference.scale_as_built(found.amax, plan, "rceil_by_log2")
    if other is not None:
        doubted |= other != found.scale
    values = round_to(found.values, BF16, overflow="ieee")
    return np.where(reference.broadcast_granules(doubted, plan), np.nan, values)


def _stacked(x: F32, mode: str) -> F64:
    """``_dequantised`` of several matrices, with blocks along their last dimension."""
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    return _dequantised(rows, mode).reshape(x.shape)


def _experts(weights: F32, offs: F32, mode: str) -> F64:
    """The weights [experts, ...] that have rows, dequantised; zeros for those that multiply
    nothing."""
    used = np.diff(offs, prepend=np.float32(0)) > 0
    found = np.zeros(weights.shape)
    found[used] = _stacked(weights[used], mode)
    return found


def _across_tokens(x: F32, call: OperatorCall) -> F64:
    """The rows [tokens, features], dequantised in blocks along the tokens and transposed; a padded
    group begins a new block."""
    if call.settings["wgrad_with_hp"]:
        return x.T.astype(np.float64)
    mode = call.settings["mode"]
    if not call.settings["padded"]:
        return _stacked(x.T, mode)
    found = np.zeros(x.T.shape)
    for _, rows in rows_of_groups(call.tensors["offs"].astype(int).tolist()):
        columns = x[rows].T
        size = columns.shape[1]
        if not size:
            continue
        found[:, rows] = _stacked(np.pad(columns, ((0, 0), (0, -size % _BLOCK))), mode)[:, :size]
    return found


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """Group by group, within the bound of ``torch.grouped_mm``: bf16's own kernel adds the
    products."""
    mode = call.settings["mode"]
    a, b, offs = (call.tensors[name] for name in ("input", "mat2", "offs"))

    def grouped(left: F64, right: F64, shape: tuple[int, ...]) -> Expected:
        return products_of_groups(left, right, offs, shape, BF16, rounding_of(call))

    weight = _experts(b.swapaxes(1, 2), offs, mode).swapaxes(1, 2)
    found = {"output": grouped(_stacked(a, mode), weight, call.outputs["output"].shape)}
    if "grad_output" not in call.tensors:
        return found
    grad = call.tensors["grad_output"]
    if "grad_input" in call.outputs:
        across = _experts(b, offs, mode).swapaxes(1, 2)
        found["grad_input"] = grouped(_stacked(grad, mode), across, a.shape)
    if "grad_weight" in call.outputs:
        left, right = (_across_tokens(x, call) for x in (a, grad))
        found["grad_weight"] = grouped(left, right.T, b.shape)
    return found


def _title(call: OperatorCall) -> str:
    return title_of_quantised(f"MXFP8 product of groups ({call.settings['mode']})", call)


OPERATOR = Operator(
    name="mxfp8_grouped_mm",
    words="MXFP8 products of groups",
    read=_read,
    expected=_expected,
    expression="mxfp8_grouped(input, mat2, offs, grad_output, {mode}, {wgrad_with_hp}, {padded})",
    title=_title,
    library=(f"{_OF}:_to_mxfp8_then_scaled_grouped_mm",),
    gradients={"A": "grad_input", "B_t": "grad_weight"},
    results=("output", "grad_input", "grad_weight"),
    optional=("grad_output",),
    helper="mxfp8_grouped",
)
