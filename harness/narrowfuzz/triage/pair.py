"""Two arrays of the same shape, and the unit in which their difference is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowfuzz.numerics.formats import F64, Format


@dataclass(frozen=True)
class Compared:
    """The actual and the expected tensor, and the unit of their difference."""

    #: The tensor, and what it is compared with, in words.
    tensor: str
    against: str
    got: Any
    expected: Any
    #: The unit of differences, one for each element or one for all; and what it is, in words.
    unit: Any
    named: str
    #: True: no difference is allowed; False: one unit is.
    exact: bool = True
    #: True at elements that are not compared.
    skip: Any = False


def last_place(x: Any, fmt: Format) -> F64:
    """The distance between neighbouring numbers of ``fmt`` at the magnitude of x."""
    size = np.where(np.isfinite(x), np.abs(x), fmt.max)
    exponent = np.maximum(np.frexp(np.maximum(size, fmt.min_normal))[1] - 1, fmt.emin)
    return np.asarray(np.ldexp(1.0, exponent - fmt.mantissa_bits), np.float64)


def exactly(tensor: str, against: str, got: Any, expected: Any, fmt: Format) -> Compared | None:
    """Two tensors that must have the same bits, in units of ``fmt``'s last place. None if one is
    missing, or if their shapes differ."""
    if got is None or expected is None or np.shape(got) != np.shape(expected):
        return None
    named = f"units in the last place of {fmt.name}"
    return Compared(tensor, against, got, expected, last_place(expected, fmt), named)
