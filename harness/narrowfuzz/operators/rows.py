"""Helpers of norms: tensors as rows that are each normalised together, and results in their own
shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.operators.operator import TORCH_DTYPE, Expected, Read
from narrowfuzz.trace.trace import OperatorCall

#: Where squares, or sums on the way, are larger than this, they may overflow, and infinity times a
#: statistic that is 0 is NaN.
LARGEST = 2.0**100


def read_gradients(
    named: Mapping[str, Any], result: Any, tensors: Sequence[str], outputs: Sequence[str]
) -> Read | None:
    """How a call of a norm's backward is read: these tensors, as far as it has them, and those of
    these results that it is asked for."""
    mask = tuple(map(bool, named["output_mask"]))
    found = zip(outputs, result, mask, strict=True)
    return Read(
        {name: t for name in tensors if (t := named.get(name)) is not None},
        {name: t for name, t, wanted in found if wanted},
        {"shape": tuple(named["normalized_shape"]), "mask": list(mask)},
    )


def rows_of(call: OperatorCall, name: str, default: float = 0.0) -> F64:
    """A tensor as [rows, n], where each row is normalised together; a parameter as one row, filled
    with ``default`` if the call has none. Raises Unjudged for rows without elements."""
    n = math.prod(call.settings["shape"])
    if not n:
        raise Unjudged("rows without elements")
    if name not in call.tensors:
        return np.full((1, n), default)
    return call.tensors[name].astype(np.float64).reshape(-1, n)


def within(centre: F64, radius: F64, call: OperatorCall, name: str, unknown: Any) -> Expected:
    """The expectation of the result ``name``, in its dtype and shape."""
    shape = call.outputs[name].shape
    unknown = np.broadcast_to(unknown, centre.shape) | ~np.isfinite(centre)
    centre, radius, unknown = (x.reshape(shape) for x in (centre, radius, unknown))
    return Expected.within(centre, radius, FORMATS[call.dtypes[name]], unknown)


def title_of(name: str, call: OperatorCall) -> str:
    """The call in words."""
    shape, dtype = list(call.tensors["input"].shape), TORCH_DTYPE[call.dtypes["input"]]
    return f"{name} of a {dtype} tensor of {shape} over {list(call.settings['shape'])}"
