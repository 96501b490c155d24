"""``torch.topk`` and ``torch.sort``, by which routers choose experts and rows are brought to
them. Their results are exact; which of equal numbers comes first is not defined, unless a sort
is stable."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import F32
from narrowfuzz.operators.operator import TORCH_DTYPE, Derived, Expected, Operator, Read
from narrowfuzz.play.derived import at_their_places
from narrowfuzz.trace.trace import OperatorCall

#: Larger tensors take longer to judge than to sort.
_MOST = 2**20
#: Whole numbers up to this are exact in fp32.
_EXACT = 2**24


def _read_topk(named: Mapping[str, Any], result: Any) -> Read | None:
    if not named.get("sorted", True):
        raise Unjudged("in no order")
    falling = named.get("largest", True)
    return _read(named, result, int(named["k"]), falling=falling, stable=False)


def _read_sort(named: Mapping[str, Any], result: Any) -> Read | None:
    x, dim = named["self"], named.get("dim", -1)
    falling, stable = named.get("descending", False), bool(named.get("stable"))
    count = x.shape[dim] if x.ndim else 1
    return _read(named, result, count, falling=falling, stable=stable)


def _read(
    named: Mapping[str, Any], result: Any, count: int, *, falling: bool, stable: bool
) -> Read | None:
    x, (values, indices) = named["self"], result
    if not x.ndim or not values.numel():
        return None
    if x.numel() > _MOST:
        raise Unjudged(f"of more than {_MOST} numbers")
    dim = named.get("dim", -1) % x.ndim
    settings = {"count": count, "dim": dim, "falling": falling, "stable": stable}
    if not x.is_floating_point():
        if (x.double().abs() > _EXACT).any():
            raise Unjudged("of whole numbers above 2^24")
        x, values = x.float(), values.float()
    return Read({"input": x}, {"values": values, "indices": indices.float()}, settings)


def _ordered(x: F32, dim: int, count: int, *, falling: bool) -> F32:
    """The first ``count`` values in order; NaN counts as the largest number."""
    rising = np.sort(x, axis=dim)
    every = np.flip(rising, axis=dim) if falling else rising
    return np.take(every, np.arange(count), axis=dim)


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """``values``: in their order. ``found``, the input at the returned indices: the same values.
    ``misplaced``: 0, because no index may occur twice or, in a stable sort, come before the smaller
    index of an equal value."""
    dim, count = call.settings["dim"], call.settings["count"]
    values = _ordered(call.tensors["input"], dim, count, falling=call.settings["falling"])
    wrong = np.zeros_like(np.take(values, [0], axis=dim))
    return {
        "values": Expected.exactly(values),
        "found": Expected.exactly(values),
        "misplaced": Expected.exactly(wrong),
    }


def _title(name: str, call: OperatorCall) -> str:
    shape, dtype = list(call.tensors["input"].shape), TORCH_DTYPE[call.dtypes["input"]]
    end = "largest" if call.settings["falling"] else "smallest"
    first = f"the {call.settings['count']} {end}" if name == "topk" else f"the {end} first"
    return f"torch.{name}, {first}, along dim {call.settings['dim']} of a {dtype} tensor of {shape}"


def _operator(name: str, expression: str, kernels: tuple[str, ...], read: Any) -> Operator:
    return Operator(
        name=name,
        words=name,
        kernels=kernels,
        read=read,
        expected=_expected,
        expression=expression,
        title=partial(_title, name),
        results=("values", "indices", "found", "misplaced"),
        derived=Derived(("found", "misplaced"), at_their_places),
    )


OPERATORS = (
    _operator(
        "topk",
        "torch.topk(input, {count}, {dim}, largest={falling})",
        ("aten::topk",),
        _read_topk,
    ),
    _operator(
        "sort",
        "torch.sort(input, dim={dim}, descending={falling}, stable={stable})",
        ("aten::sort", "aten::sort.stable"),
        _read_sort,
    ),
)
