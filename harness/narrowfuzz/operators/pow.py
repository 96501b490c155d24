"""``torch.pow`` with a number as exponent, as in hand-written norms, which take the mean of
squares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.operators.operator import TORCH_DTYPE, UNIT, Expected, Operator, Read
from narrowfuzz.operators.sampled import elements
from narrowfuzz.operators.sum import FLUSHED
from narrowfuzz.trace.trace import OperatorCall

#: Exponents for which torch multiplies, or takes the square root. All others go to the C library's
#: or a GPU's pow.
_JUDGED = (0.0, 0.5, 1.0, 2.0, 3.0)


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    x, exponent = named["self"], named["exponent"]
    if x.dtype != result.dtype:
        raise Unjudged("of whole numbers")
    if isinstance(exponent, complex) or float(exponent) not in _JUDGED:
        raise Unjudged(f"with {exponent} as exponent")
    return Read({"input": x}, {"output": result}, {"exponent": float(exponent)})


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """The power in fp32, rounded to the dtype. A cube is two products, each rounded to the dtype.
    Behind the last full vector register a square root is the C library's pow, which errs by less
    than a unit in the last place of fp32 (glibc manual, Errors in Math Functions)."""
    x, exponent = call.tensors["input"].astype(np.float64), call.settings["exponent"]
    dtype = call.dtypes["output"]
    unit, least = UNIT[dtype]
    with np.errstate(all="ignore"):
        centre = x**exponent
        radius = np.zeros(x.shape)
        if exponent == 0.5:
            radius = 2.0 * U32 * centre
        if exponent == 3.0:
            radius = 1.01 * unit * np.abs(centre) + least * np.abs(x)
        radius = radius + (FLUSHED if exponent not in (0.0, 1.0) else 0.0)
        radius = np.where(np.isfinite(centre), radius, 0.0)
    unknown = np.isneginf(x) & (exponent == 0.5)  # C's pow gives infinity, a square root NaN
    return {"output": Expected.within(centre, radius, FORMATS[dtype], unknown)}


def _title(call: OperatorCall) -> str:
    shape = list(call.tensors["input"].shape)
    dtype = TORCH_DTYPE[call.dtypes["input"]]
    return f"torch.pow, exponent {call.settings['exponent']:g}, of a {dtype} tensor of {shape}"


OPERATOR = Operator(
    name="pow",
    words="powers",
    kernels=("aten::pow.Tensor_Scalar",),
    read=_read,
    expected=partial(elements, _expected),
    expression="torch.pow(input, {exponent})",
    title=_title,
)
