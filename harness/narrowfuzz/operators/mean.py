"""``torch.mean`` over some dimensions, as in hand-written norms and losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import FORMATS, FP32
from narrowfuzz.operators.operator import Expected, Operator, Read
from narrowfuzz.operators.sum import dims_of, summed, title_of
from narrowfuzz.trace.trace import OperatorCall


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    x = named["self"]
    if not x.numel() or x.dtype != result.dtype:
        raise Unjudged("of nothing, or asked for in another dtype")
    return Read({"input": x}, {"output": result}, dims_of(named))


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


OPERATOR = Operator(
    name="mean",
    words="means",
    kernels=("aten::mean", "aten::mean.dim"),
    read=_read,
    expected=_expected,
    expression="torch.mean(input, dim={dim}, keepdim={keepdim})",
    title=partial(title_of, "torch.mean"),
)
