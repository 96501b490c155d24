"""``torch.linalg.vector_norm`` over some dimensions, of orders 2, 1 and infinity, for one tensor or
a list: ``clip_grad_norm_`` takes it of gradients, and rows are scaled by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged, gamma
from narrowfuzz.numerics.formats import F64, FORMATS, FP32, round_to
from narrowfuzz.operators.operator import Expected, Operator, Read
from narrowfuzz.operators.sum import FLUSHED, exact_sums, summed, title_of
from narrowfuzz.trace.trace import OperatorCall

#: For more elements the bound of a sum in fp32 is too wide to be useful.
LARGEST_TENSOR = 2**20


def _read(named: Mapping[str, Any], result: Any) -> Read | list[Read | str]:
    x, order = named["self"], float(named.get("ord", 2))
    if order not in (1.0, 2.0, math.inf):
        raise Unjudged(f"of order {order:g}")
    dims, keeps = named.get("dim"), bool(named.get("keepdim", False))
    if isinstance(x, (list, tuple)):
        pairs = zip(x, result, strict=True)
        return [_large(t) or _one(t, order, None, False, norm) for t, norm in pairs]
    if why := _large(x):
        raise Unjudged(why)
    return _one(x, order, dims, keeps, result)


def _large(x: Any) -> str:
    more = x.numel() > LARGEST_TENSOR
    return f"a tensor of more than {LARGEST_TENSOR} elements" if more else ""


def _one(x: Any, order: float, dims: Any, keeps: bool, norm: Any) -> Read:
    dims = (dims,) if isinstance(dims, int) else dims
    axes = tuple(sorted(d % x.ndim for d in dims)) if dims and x.ndim else tuple(range(x.ndim))
    # repr(math.inf) is not a Python expression
    how = {"ord": "torch.inf" if order == math.inf else order, "dim": axes, "keepdim": keeps}
    return Read({"input": x}, {"output": norm}, {**how, "dtype": str(norm.dtype)})


def _ends(x: F64, order: float, axes: tuple[int, ...]) -> tuple[F64, F64, F64, Any]:
    """The norm of finite numbers in float64; the least and the largest value that it may have in
    fp32; and where it may overflow on the way. The reduced dimensions have size 1."""
    if order == math.inf:
        largest = np.max(np.abs(x), axis=axes, keepdims=True, initial=0.0)
        return largest, largest, largest, np.zeros(largest.shape, dtype=bool)
    if order == 1.0:
        total = summed(np.abs(x), axes, FP32, keepdims=True)
        exact = exact_sums(x, axes, keepdims=True)
        radius = np.where(exact, 0.0, total.radius)
        low = np.maximum(total.centre - radius, 0.0)
        return total.centre, low, total.centre + radius, total.unknown
    squares = np.square(x)
    count = math.prod(x.shape[axis] for axis in axes)
    total = squares.sum(axis=axes, keepdims=True)
    radius = gamma(max(1, count)) * total + count * FLUSHED
    root = np.sqrt(total)
    narrow = (squares.astype(np.float32) == squares).all(axis=axes, keepdims=True)
    exact = narrow & exact_sums(squares, axes, keepdims=True) & (np.float32(root) ** 2.0 == total)
    low = np.sqrt(np.maximum(total - radius, 0.0)) * (1.0 - 2.0 * U32)
    high = np.sqrt(total + radius) * (1.0 + 2.0 * U32)
    ends = (np.where(exact, root, end) for end in (low, high))
    return root, *ends, ~(total + radius < FP32.max * 0.5)


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """The norm in fp32, rounded once; elements that are not finite make it infinite or NaN.

    Proof. Order 1 is a sum; for order infinity nothing is rounded. For order 2 each square and n -
    1 additions are rounded in any order, so that the sum of squares errs by at most gamma_n of
    itself (Higham, "Accuracy and Stability", 4.2), the root by half of that, and by its own
    rounding; a kernel may flush squares below fp32's normals. torch's kernels square and add bf16
    and fp16 numbers in fp32 (``NormTwoOps`` and the loop over rows in ReduceOpsKernel.cpp,
    ``LpNormFunctor`` in ForeachReduceOp.cu). The norm is exact where fp32 holds every square, every
    partial sum and the root. Where the squares add up to half of fp32's largest number, they may
    overflow.
    """
    x, settings = call.tensors["input"].astype(np.float64), call.settings
    order = math.inf if settings["ord"] == "torch.inf" else settings["ord"]
    axes, keeps = settings["dim"], settings["keepdim"]
    with np.errstate(all="ignore"):
        finite = np.isfinite(x)
        centre, low, high, unknown = _ends(np.where(finite, x, 0.0), order, axes)
        special = ~finite.all(axis=axes, keepdims=True)
        infinite = np.abs(np.where(finite, 0.0, x)).sum(axis=axes, keepdims=True)
        centre, low, high = (np.where(special, infinite, t) for t in (centre, low, high))
        ends = np.stack([low, high])
        lo, hi = round_to(ends, FORMATS[call.dtypes["output"]], overflow="ieee")
        radius = np.maximum(high - centre, centre - low)
    found = centre, np.where(special, 0.0, radius), lo, hi, unknown & ~special
    if not keeps:
        found = tuple(t.squeeze(axis=axes) for t in found)  # type: ignore[assignment]
    centre, radius, lo, hi, unknown = (np.asarray(t) for t in found)
    return {"output": Expected(centre, radius, lo, hi, unknown)}


def _title(call: OperatorCall) -> str:
    order = str(call.settings["ord"]).removeprefix("torch.").removesuffix(".0")
    return title_of(f"the {order}-norm", call)


OPERATOR = Operator(
    name="vector_norm",
    words="vector norms",
    kernels=("aten::linalg_vector_norm", "aten::_foreach_norm.Scalar"),
    read=_read,
    expected=_expected,
    expression="torch.linalg.vector_norm(input, {ord}, {dim}, {keepdim}, dtype={dtype})",
    title=_title,
)
