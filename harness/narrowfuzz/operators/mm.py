"""``torch.mm`` and ``torch.addmm`` outside of linear layers: heads that share an embedding's
weight, experts in a loop, and whatever else a model multiplies by itself; forward, and both
gradients.

Products of linear layers are judged layer by layer, and not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import FORMATS, round_to
from narrowfuzz.operators.bmm import products, rounding_of, title_of
from narrowfuzz.operators.operator import Expected, Operator, Read, hull
from narrowfuzz.operators.sampled import Chosen, judge_sampled, sample_places
from narrowfuzz.trace.trace import OperatorCall

#: Of calls with more products than this only some rows and columns are judged.
_MOST = 2**22


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    a, b = named["self"], named["mat2"]
    if not result.numel() or not a.numel():
        return None  # the result is empty, or zeros
    return Read({"input": a, "mat2": b}, {"output": result}, {})


def _read_with_bias(named: Mapping[str, Any], result: Any) -> Read | None:
    bias, a, b = named["self"], named["mat1"], named["mat2"]
    if not result.numel() or not a.numel():
        return None
    if bias.ndim != 1 or len(bias) != result.shape[1]:
        raise Unjudged("products to which more than a row is added")
    if named.get("alpha", 1) != 1 or named.get("beta", 1) != 1:
        raise Unjudged("products that are added with a factor")
    return Read({"bias": bias, "input": a, "mat2": b}, {"output": result}, {})


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """As for ``torch.bmm``. A bias is either one more product, with a factor of 1, which a kernel
    may begin with; or it is added to the rounded product, and that sum is rounded again. The result
    lies in the hull of both intervals."""
    a, b = (call.tensors[name].astype(np.float64) for name in ("input", "mat2"))
    fmt, rounding = FORMATS[call.dtypes["output"]], rounding_of(call)
    product = products(a, b, fmt, rounding)
    if "bias" not in call.tensors:
        return {"output": product}
    bias = call.tensors["bias"].astype(np.float64)
    ones = np.ones((len(a), 1))
    fused = products(np.concatenate([a, ones], 1), np.concatenate([b, bias[None]]), fmt, rounding)
    with np.errstate(all="ignore"):
        lo, hi = (round_to(end + bias, fmt, overflow="ieee") for end in (product.lo, product.hi))
    apart = Expected.between(lo, hi, product.unknown)
    return {"output": hull(fused, apart)}


def _of_some(call: OperatorCall) -> dict[str, Expected]:
    """The expected results; for a large call only of some rows and columns."""
    (rows, count), columns = call.tensors["input"].shape, call.tensors["mat2"].shape[1]
    if rows * count * columns <= _MOST:
        return _expected(call)
    few = sample_places(columns, max(1, _MOST // (16 * count)))
    some = sample_places(rows, max(1, _MOST // (4 * count * len(few))))
    return judge_sampled(partial(_of_rows, some), call, {"bias": 0, "mat2": 1, "output": 1}, few)


def _of_rows(chosen: Chosen, call: OperatorCall) -> dict[str, Expected]:
    return judge_sampled(_expected, call, {"input": 0, "output": 0}, chosen)


OPERATORS = (
    Operator(
        name="mm",
        words="products of matrices",
        kernels=("aten::mm",),
        read=_read,
        expected=_of_some,
        expression="torch.mm(input, mat2)",
        title=partial(title_of, "torch.mm"),
        of_linears=True,
    ),
    Operator(
        name="addmm",
        words="products of matrices with a bias",
        kernels=("aten::addmm",),
        read=_read_with_bias,
        expected=_of_some,
        expression="torch.addmm(bias, input, mat2)",
        title=partial(title_of, "torch.addmm"),
        of_linears=True,
    ),
)
