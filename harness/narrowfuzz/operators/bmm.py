"""``torch.bmm``: batched products outside of linear layers, as in hand-written attention and
experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import Unjudged, gamma
from narrowfuzz.numerics.formats import F64, FORMATS, Format
from narrowfuzz.operators.operator import TORCH_DTYPE, Expected, Operator, Read
from narrowfuzz.operators.sampled import judge_sampled, sample_places
from narrowfuzz.operators.sum import FLUSHED, unit_of
from narrowfuzz.trace.trace import OperatorCall

#: Calls with more products than this take longer to judge than to compute.
_MOST = 2**22


def _read(named: Mapping[str, Any], result: Any) -> Read | None:
    a, b = named["self"], named["mat2"]
    if not a.numel() or not b.numel():
        return None  # the result is zeros, or empty
    if b.numel() > _MOST:
        raise Unjudged("more than 2^22 products a row take longer to judge than to compute")
    return Read({"input": a, "mat2": b}, {"output": result}, {})


def products(a: F64, b: F64, fmt: Format, rounding: MultiplyRounding) -> Expected:
    """[..., M, K] times [..., K, N]: sums of K products in fp32, in any order, rounded once."""
    centre, radius, unknown = sums_of(
        Factors.of(a, rounding), Factors.of(b, rounding), fmt, rounding
    )
    return Expected.within(centre, radius, fmt, unknown)


def sums_of(
    a: Factors, b: Factors, fmt: Format, rounding: MultiplyRounding
) -> tuple[F64, F64, NDArray[np.bool_]]:
    """[..., M, K] times [..., K, N]: the sums of K products; the largest distance from them that a
    kernel's sums may have before they are rounded to ``fmt``; and a mask of the elements of which
    nothing is known.

    Proof. Each product is rounded to fp32 at most, or not at all (an FMA, or factors of few bits),
    and K - 1 additions are rounded: gamma_K of the sum of magnitudes (Higham 3.1). Units that round
    to odd err twice as much. A GPU's tensor cores truncate each of K products, and twice per step
    of at least 8 products the sum, at 2^-23 of the largest term, in which a subnormal factor counts
    as the smallest normal number (``accumulator.sum_radius``). Products and factors below fp32's
    normal numbers may be flushed to zero; each flushed factor costs up to 2^-126 times the number
    that it is multiplied by. Where all products are multiples of one power of two, and their
    magnitudes add up to at most 2^24 times it, there is nothing to round.
    """
    count = a.values.shape[-1]
    with np.errstate(all="ignore"):
        aligned = size = a.size @ b.size
        if rounding.least:
            aligned = a.aligned @ b.aligned
        unit = a.unit.min(-1, keepdims=True, initial=np.inf)
        unit = unit * b.unit.min(-2, keepdims=True, initial=np.inf)
        flushed = a.size.sum(-1, keepdims=True) + b.size.sum(-2, keepdims=True)
        radius = gamma(rounding.roundings(count)) * aligned + FLUSHED * (count + flushed)
        radius[(aligned <= unit * 2.0**24) & (unit >= FLUSHED)] = 0.0
        unknown = ~(size < fmt.max * 0.5)
        unknown |= ~(a.finite.all((-1, -2), keepdims=True) & b.finite.all((-1, -2), keepdims=True))
        return a.values @ b.values, radius, unknown


@dataclass(frozen=True)
class Factors:
    """The elements of an operand, with the properties that determine the error of sums of their
    products."""

    values: F64
    #: Magnitudes, and the magnitudes that the elements count as where tensor cores align them.
    size: F64
    aligned: F64
    #: The largest power of two that divides an element; infinity for 0, and 0 for an element that a
    #: kernel may flush to zero.
    unit: F64
    finite: NDArray[np.bool_]

    @classmethod
    def of(cls, values: F64, rounding: MultiplyRounding) -> Factors:
        with np.errstate(all="ignore"):
            size, unit = np.abs(values), unit_of(values)
            unit[(size < FLUSHED) & (values != 0.0)] = 0.0
            aligned = size
            if rounding.least:
                aligned = np.where(values == 0.0, 0.0, np.maximum(size, rounding.least))
        return cls(values, size, aligned, unit, np.isfinite(values))


@dataclass(frozen=True)
class MultiplyRounding:
    """How the multiplying unit rounds: with ``times`` the error of an IEEE addition, once more
    after each step of ``step`` products (0: not), and with smaller factors counted as ``least``."""

    times: int = 1
    step: int = 0
    least: float = 0.0

    def roundings(self, products: int) -> int:
        """The number of IEEE roundings whose error covers that of a sum of ``products``
        products."""
        steps = math.ceil(products / self.step) if self.step else 0
        return self.times * (products + 2 * steps)


def rounding_of(call: OperatorCall) -> MultiplyRounding:
    """The rounding of the units of the call's device: a CPU's units for bf16 may round to odd; a
    GPU's truncate."""
    if call.device == "cuda":
        return MultiplyRounding(2, 8, FORMATS[call.dtypes["input"]].min_normal)
    return MultiplyRounding(2 if call.dtypes["input"] == "bf16" else 1)


def _expected(call: OperatorCall) -> dict[str, Expected]:
    a, b = (call.tensors[name].astype(np.float64) for name in ("input", "mat2"))
    fmt = FORMATS[call.dtypes["output"]]
    return {"output": products(a, b, fmt, rounding_of(call))}


def _of_some_rows(call: OperatorCall) -> dict[str, Expected]:
    """The expected results; for a large call only of some rows of every matrix."""
    rows, products = call.tensors["input"].shape[1], call.tensors["mat2"].size
    if rows * products <= _MOST:
        return _expected(call)
    chosen = sample_places(rows, _MOST // (4 * products))
    return judge_sampled(_expected, call, {"input": 1, "output": 1}, chosen)


def title_of(name: str, call: OperatorCall) -> str:
    """A product in words."""
    a, b = (list(call.tensors[name].shape) for name in ("input", "mat2"))
    return f"{name} of {TORCH_DTYPE[call.dtypes['input']]} tensors of {a} and {b}"


OPERATOR = Operator(
    name="bmm",
    words="batched products",
    kernels=("aten::bmm",),
    read=_read,
    expected=_of_some_rows,
    expression="torch.bmm(input, mat2)",
    title=partial(title_of, "torch.bmm"),
)
