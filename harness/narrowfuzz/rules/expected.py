"""Comparison of results with what an operator may return: ``operators.operator.Expected``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics import bounds
from narrowfuzz.numerics.formats import F32
from narrowfuzz.operators.operator import Expected
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import between, number
from narrowfuzz.trace.verdict import Verdict

#: Why results inside their intervals do not pass: zeros, or the opposite signs, would fit, too.
NOTHING = "every element may be 0"
_UNKNOWN = "every element may overflow or is NaN"


def outside(may: Expected, got: F32) -> NDArray[np.bool_]:
    """True for elements of ``got`` that neither lie in their interval nor are the NaN they must be;
    elements of which nothing is known are False."""
    inside = bounds.contains(may.lo, may.hi, got) | may.unknown
    if not inside.all():
        inside |= np.isnan(got) & np.isnan(may.lo)
    return np.asarray(~inside)


def passed(rule: str, arm: str, role: str, may: Expected) -> Verdict:
    """The verdict if no element is outside: ok, or inconclusive if zeros would not be outside,
    either."""
    known = ~may.unknown
    if may.unknown.size and not known.any():
        return plain(rule, arm, role, "inconclusive", _UNKNOWN)
    sure = bounds.excludes_zero(may.lo, may.hi) | np.isnan(may.lo)
    if not (sure & known).any():
        return plain(rule, arm, role, "inconclusive", NOTHING)
    return plain(rule, arm, role, "ok")


def beyond(
    rule: str, arm: str, role: str, symptom: str, at: At, got: F32, may: Expected, **more: Any
) -> Verdict:
    """The divergence of the element at ``at.index``, which is outside of its interval, with the
    distance as its factor."""
    actual, expect = number(got[at.index]), between(may.lo[at.index], may.hi[at.index])
    factor = radii(may, got, at.index)
    return diverged(rule, arm, role, symptom, at, actual, expect, factor=factor, **more)


def radii(may: Expected, got: F32, at: tuple[int, ...]) -> float:
    """The error of element ``at``, in units of the radius that is allowed before rounding; 0 if the
    error or the radius is not finite, or the radius is 0."""
    off, radius = abs(float(got[at]) - float(may.centre[at])), float(may.radius[at])
    return off / radius if np.isfinite(off) and 0.0 < radius < np.inf else 0.0
