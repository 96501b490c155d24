"""``torch.bmm``: products of matrices that no linear multiplies, as attention and experts that are
written by hand have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import gamma
from narrowfuzz.numerics.formats import F64, FORMATS, Format
from narrowfuzz.operators.operator import TORCH_DTYPE, Expected, Operator, Read
from narrowfuzz.operators.sampled import along, spread
from narrowfuzz.operators.sum import FLUSHED, unit_of
from narrowfuzz.trace.trace import OperatorCall

#: More products than this take longer to judge than to compute.
_MOST = 2**22


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    a, b = named["self"], named["mat2"]
    if not a.numel() or not b.numel():
        return None  # zeros, or nothing
    if b.numel() > _MOST:
        raise ValueError("more than 2^22 products a row take longer to judge than to compute")
    return Read({"input": a, "mat2": b}, {"output": result}, {})


def products(a: F64, b: F64, fmt: Format, cut: Cut) -> Expected:
    """[B, M, K] times [B, K, N]: sums of K products in fp32, in any order, rounded once.

    Proof. Each product is rounded to fp32 at most, or not at all (an FMA, or factors of few bits),
    and K - 1 additions are rounded: gamma_K of the sum of magnitudes (Higham 3.1). Units that round
    to odd err twice as much. A GPU's tensor cores cut each of K products, and twice a step of at
    least 8 what is added up, at 2^-23 of the largest, of which a subnormal factor counts as the
    smallest normal number (``accumulator.sum_radius``). Products and factors below fp32's normal
    numbers may be flushed to zero, the latter times the largest of the other operand. Where all
    products are multiples of one power of two, and add up to at most 2^24 of it, there is nothing
    to round.
    """
    with np.errstate(all="ignore"):
        size = np.abs(a) @ np.abs(b)
        aligned = _aligned(a, cut.least) @ _aligned(b, cut.least)
        unit = _least_unit(a, 2) * _least_unit(b, 1)
        exact = (aligned <= unit * 2.0**24) & (unit >= FLUSHED)
        exact &= ~(_subnormal(a).any(2, keepdims=True) | _subnormal(b).any(1, keepdims=True))
        radius = np.where(exact, 0.0, gamma(cut.roundings(a.shape[-1])) * aligned)
        radius = radius + np.where(exact, 0.0, _flushed(a, b))
        finite = np.isfinite(a).all((1, 2), keepdims=True) & np.isfinite(b).all(
            (1, 2), keepdims=True
        )
        unknown = np.asarray(~(size < fmt.max * 0.5) | ~finite)
        centre = a @ b
    return Expected.within(centre, radius, fmt, unknown)


@dataclass(frozen=True)
class Cut:
    """How what multiplies cuts: ``times`` as much as an IEEE addition, after steps of ``step``
    products besides (0: not), and the number that smaller factors count as."""

    times: int = 1
    step: int = 0
    least: float = 0.0

    def roundings(self, products: int) -> int:
        """Of so many products."""
        steps = math.ceil(products / self.step) if self.step else 0
        return self.times * (products + 2 * steps)


def cut_of(call: OperatorCall) -> Cut:
    """Units for bf16 may round to odd; those of a GPU cut."""
    if call.device == "cuda":
        return Cut(2, 8, FORMATS[call.dtypes["input"]].min_normal)
    return Cut(2 if call.dtypes["input"] == "bf16" else 1)


def _expected(call: OperatorCall) -> dict[str, Expected]:
    a, b = (call.tensors[name].astype(np.float64) for name in ("input", "mat2"))
    fmt = FORMATS[call.dtypes["output"]]
    return {"output": products(a, b, fmt, cut_of(call))}


def _of_some_rows(call: OperatorCall) -> dict[str, Expected]:
    """Of a large call some rows of every matrix."""
    rows, products = call.tensors["input"].shape[1], call.tensors["mat2"].size
    if rows * products <= _MOST:
        return _expected(call)
    chosen = spread(rows, _MOST // (4 * products))
    return along(_expected, call, {"input": 1, "output": 1}, chosen)


def _aligned(x: F64, least: float) -> F64:
    """The magnitudes that numbers count as."""
    return np.where(x == 0.0, 0.0, np.maximum(np.abs(x), least))


def _least_unit(x: F64, axis: int) -> F64:
    """The largest power of two that divides all of a row, or a column."""
    return np.asarray(np.min(unit_of(x), axis=axis, keepdims=True, initial=np.inf))


def _subnormal(x: F64) -> NDArray[np.bool_]:
    return np.asarray((np.abs(x) < FLUSHED) & (x != 0.0))


def _flushed(a: F64, b: F64) -> F64:
    """What kernels may take for zero: products, and factors below the normal numbers."""
    factors = np.abs(a).sum(2, keepdims=True) + np.abs(b).sum(1, keepdims=True)
    return np.asarray(FLUSHED * (a.shape[-1] + factors))


def _title(call: OperatorCall) -> str:
    a, b = (list(call.tensors[name].shape) for name in ("input", "mat2"))
    return f"torch.bmm of {TORCH_DTYPE[call.dtypes['input']]} tensors of {a} and {b}"


OPERATOR = Operator(
    name="bmm",
    words="batched products",
    kernels=("aten::bmm",),
    read=_read,
    expected=_of_some_rows,
    expression="torch.bmm(input, mat2)",
    title=_title,
)
