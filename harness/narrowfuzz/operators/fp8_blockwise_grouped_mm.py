"""torchao's blockwise FP8 grouped products, emulated: activations are quantised in runs of 128
along the contracted axis, weights in squares of 128; both are dequantised to bf16 and multiplied
group by group.

The plan is that of torchao 0.18 ``prototype/moe_training/blockwise_fp8/grouped_mm.py``. The weight
gradient contracts over tokens: where torchao pads groups to 128 rows, each group begins a new run;
where it does not, the runs are those of all tokens, so that a group's border may fall inside a run.
The quantising kernels are Triton's, which a CPU runs only in an interpreter (``triton_on_cpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics import reference
from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import BF16, E4M3FN, F32, F64, decode, round_to
from narrowfuzz.numerics.plan import Fp32Scale, OperandPlan
from narrowfuzz.operators.bmm import MultiplyRounding, products, rounding_of
from narrowfuzz.operators.grouped_mm import read_quantised, rows_of_groups, title_of_quantised
from narrowfuzz.operators.operator import Deviation, Expected, Operator, Read
from narrowfuzz.trace.trace import OperatorCall

_BLOCK = 128
_SCALE = Fp32Scale(eps=1e-12, power_of_two=False)
_RUN = OperandPlan(E4M3FN, "block", _BLOCK, _SCALE)
_SQUARE = OperandPlan(E4M3FN, "tile", _BLOCK, _SCALE)
_OF = "torchao.prototype.moe_training.blockwise_fp8.grouped_mm"


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    a, b = named["A"], named["B_t"]
    if named["kernel_preference"].name != "EMULATED" and a.is_cuda and find_spec("deep_gemm"):
        raise Unjudged("blockwise FP8 products of groups by DeepGEMM")
    if a.dtype != b.dtype or str(named["out_dtype"]) != "torch.bfloat16":
        raise Unjudged("blockwise FP8 products of groups of two dtypes")
    return read_quantised(named, result, {"padded": named["pad_token_groups_for_grouped_mm"]})


#: Rows dequantised to bf16, [rows, K]: NaN in a block that contains NaN, and infinity where nothing
#: is known, which is in a block that contains an infinity, and where a value overflows bf16.
_Values = F64
_Made = Callable[[F32, OperandPlan], _Values]


def _quantised(x: F32, plan: OperandPlan) -> _Values:
    """Rows quantised by the plan, which preserves NaN, as torchao's references in torch do."""
    return _dequantised(x, plan, np.zeros(x.shape, dtype=bool))


def _without_nan(x: F32, plan: OperandPlan) -> _Values:
    """Rows quantised as the kernels do it: the amax ignores NaN, whose code is 448."""
    hidden = np.isnan(x)
    return _dequantised(np.where(hidden, np.float32(0.0), x), plan, hidden)


def _dequantised(x: F32, plan: OperandPlan, hidden: NDArray[np.bool_]) -> _Values:
    """The values of the quantised rows: a code and the reciprocal of its scale, which is stored in
    fp32, are rounded to bf16, and so is their product. The code is 448 where ``hidden`` is set."""
    found = reference.quantise(np.ascontiguousarray(x), plan)
    assert found is not None
    codes = np.where(hidden, E4M3FN.max, decode(found.codes, E4M3FN))
    with np.errstate(all="ignore"):
        stored = round_to((np.float32(1.0) / found.scale).astype(np.float64), BF16, overflow="ieee")
        values = round_to(codes * reference.broadcast_granules(stored, plan), BF16, overflow="ieee")
    return np.where(reference.broadcast_granules(np.isinf(found.amax), plan), np.inf, values)


def _product(a: _Values, b: _Values, rounding: MultiplyRounding) -> Expected:
    """A @ B^T rounded once to bf16. A row with a NaN makes all its results NaN."""
    doubted = np.isinf(a).any(1, keepdims=True) | np.isinf(b).any(1)
    nan = np.isnan(a).any(1, keepdims=True) | np.isnan(b).any(1)
    left, right = (np.where(np.isfinite(x), x, 0.0) for x in (a, b))
    found = products(left, right.T, BF16, rounding)
    lo, hi = (np.where(nan, np.nan, end) for end in (found.lo, found.hi))
    return Expected.between(lo, hi, np.asarray(doubted | (found.unknown & ~nan)))


def _expected(call: OperatorCall) -> dict[str, Expected]:
    return _by(_quantised, call)


def _by(made: _Made, call: OperatorCall) -> dict[str, Expected]:
    """The expected results, group by group, of operands that ``made`` quantises; nothing is known
    of rows outside all groups."""
    a, b, offs = (call.tensors[name] for name in ("input", "mat2", "offs"))
    grad, rounding = call.tensors.get("grad_output"), rounding_of(call)
    shapes = {"output": call.outputs["output"].shape, "grad_input": a.shape, "grad_weight": b.shape}
    found = {name: Expected.unwritten(shapes[name]) for name in call.outputs}
    across = [_runs_of_tokens(made, x, call) for x in (a, grad) if x is not None]
    for group, rows in rows_of_groups(offs.astype(int).tolist()):
        weight = b[group].T
        found["output"].put(rows, _product(made(a[rows], _RUN), made(weight, _SQUARE), rounding))
        if grad is not None and "grad_input" in found:
            of = _product(made(grad[rows], _RUN), made(weight.T, _SQUARE), rounding)
            found["grad_input"].put(rows, of)
        if grad is not None and "grad_weight" in found:
            inputs, grads = (of(rows) for of in across)
            found["grad_weight"].put(group, _product(inputs, grads, rounding))
    return found


def _runs_of_tokens(made: _Made, x: F32, call: OperatorCall) -> Callable[[slice], _Values]:
    """A function that returns the dequantised columns of a slice of the tokens, [features,
    tokens]."""
    if call.settings["padded"]:

        def of_group(rows: slice) -> _Values:
            columns = x[rows].T
            padded = np.pad(columns, ((0, 0), (0, -columns.shape[1] % _BLOCK)))
            return made(padded, _RUN)

        return of_group
    every = made(x.T, _RUN)
    return lambda rows: every[:, rows]


def _nan_hidden(call: OperatorCall) -> Mapping[str, Expected]:
    if not any(np.isnan(x).any() for name, x in call.tensors.items() if name != "offs"):
        return {}
    return _by(_without_nan, call)


OPERATOR = Operator(
    name="fp8_blockwise_grouped_mm",
    words="blockwise FP8 products of groups",
    read=_read,
    expected=_expected,
    expression="fp8_blockwise_grouped(input, mat2, offs, grad_output, {padded})",
    title=partial(title_of_quantised, "FP8 product of groups (blockwise)"),
    library=(f"{_OF}:_to_fp8_blockwise_then_scaled_grouped_mm",),
    gradients={"A": "grad_input", "B_t": "grad_weight"},
    results=("output", "grad_input", "grad_weight"),
    optional=("grad_output",),
    deviations=(
        Deviation(
            "blockwise_nan_hidden",
            "a NaN becomes the code 448, and leaves no trace in the scale of its block",
            ("cpu", "cuda"),
            _nan_hidden,
        ),
    ),
    helper="fp8_blockwise_grouped",
)
