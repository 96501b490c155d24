"""Two arrays of one shape, and the unit in which their difference is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowfuzz.numerics.formats import F64, Format


@dataclass(frozen=True)
class Compared:
    """What came and what was expected."""

    #: What is compared, and what it is held against.
    tensor: str
    against: str
    got: Any
    expected: Any
    #: Of every element, or of all of them; and what it is.
    unit: Any
    named: str
    #: True: nothing but zero is allowed; False: one unit is.
    exact: bool = True
    #: Elements of which nothing is said.
    skip: Any = False


def last_place(x: Any, fmt: Format) -> F64:
    """The distance of neighbours of ``fmt`` at the magnitude of x."""
    size = np.where(np.isfinite(x), np.abs(x), fmt.max)
    exponent = np.maximum(np.frexp(np.maximum(size, fmt.min_normal))[1] - 1, fmt.emin)
    return np.asarray(np.ldexp(1.0, exponent - fmt.mantissa_bits), np.float64)


def exactly(tensor: str, against: str, got: Any, expected: Any, fmt: Format) -> Compared | None:
    """What must have the same bits, in units of ``fmt``'s last place."""
    if got is None or expected is None or np.shape(got) != np.shape(expected):
        return None
    named = f"units in the last place of {fmt.name}"
    return Compared(tensor, against, got, expected, last_place(expected, fmt), named)
