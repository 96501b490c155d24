"""``torch.mean`` over some dimensions, as in hand-written norms and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import FORMATS, FP32
from narrowfuzz.operators.operator import TORCH_DTYPE, Expected, Operator, Read
from narrowfuzz.operators.sum import over, summed
from narrowfuzz.trace.trace import OperatorCall


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    x, dims = named["self"], named.get("dim")
    if not x.numel() or x.dtype != result.dtype:
        raise Unjudged("of nothing, or asked for in another dtype")
    axes = tuple(sorted(d % x.ndim for d in dims)) if dims and x.ndim else tuple(range(x.ndim))
    settings = {"dim": axes, "keepdim": bool(named.get("keepdim", False))}
    return Read({"input": x}, {"output": result}, settings)


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """The sum in fp32, in any order, divided by the number of terms and rounded once. In bf16 and
    fp16 torch casts to fp32 before it adds, and back after it has divided, so no sum overflows
    them."""
    x, axes, keeps = call.tensors["input"], call.settings["dim"], call.settings["keepdim"]
    with np.errstate(all="ignore"):
        total = summed(x.astype(np.float64), axes, FP32, keepdims=keeps)
        count = x.size / max(total.centre.size, 1)
        centre = total.centre / count
        radius = total.radius / count + 2.0 * U32 * (np.abs(centre) + total.radius / count)
    return {"output": Expected.within(centre, radius, FORMATS[call.dtypes["input"]], total.unknown)}


def _title(call: OperatorCall) -> str:
    shape = list(call.tensors["input"].shape)
    dtype = TORCH_DTYPE[call.dtypes["input"]]
    return f"torch.mean over {over(call)} of a {dtype} tensor of {shape}"


OPERATOR = Operator(
    name="mean",
    words="means",
    kernels=("aten::mean", "aten::mean.dim"),
    read=_read,
    expected=_expected,
    expression="torch.mean(input, dim={dim}, keepdim={keepdim})",
    title=_title,
)
