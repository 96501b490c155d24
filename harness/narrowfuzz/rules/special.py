"""O10 finite and O11 nan-provenance: where Inf and NaN may, and must, come out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowfuzz.numerics.formats import F32, FORMATS
from narrowfuzz.numerics.plan import Role
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.gemm import each_result
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, between, bits
from narrowfuzz.trace.verdict import Verdict


def check_finite(evidence: Evidence) -> Iterator[Verdict]:
    """O10: where bound 3.3 keeps the result below the format's maximum, it is finite."""
    return each_result(evidence, "O10", _judge_finite)


def _judge_finite(evidence: Evidence, arm: str, role: Role, got: F32) -> Verdict:
    largest = FORMATS[evidence.spec.dtype].max
    centre, radius = evidence.reference.layer(role)
    with np.errstate(invalid="ignore"):
        reach = np.abs(centre) + radius
        must = (reach < 0.99 * largest) & ~evidence.reference.may_overflow(role)
    if role == "output" and "bias" in evidence.tensors:
        with np.errstate(invalid="ignore"):
            must &= np.abs(evidence.tensors["bias"])[None, :] < 0.005 * largest
    if got.size and not must.any():
        return plain("O10", arm, role, "inconclusive", "no element is certainly in range")
    bad = must & ~np.isfinite(got)
    if not bad.any():
        return plain("O10", arm, role, "ok")
    at = first(bad)
    here, actual, expect = At(name=role, index=at), number(got[at]), between(-largest, largest)
    factor = float(reach[at]) / largest
    return diverged("O10", arm, role, "not finite", here, actual, expect, factor=factor)


def check_nan_provenance(evidence: Evidence) -> Iterator[Verdict]:
    """O11: a result is NaN exactly where that of the plan, executed with IEEE rules, is NaN.

    Elements whose partial sums may overflow are not judged: Inf - Inf depends on the order of sums.
    A non-finite operand makes an element's reach infinite, so the plan's own NaNs are added back.
    """
    return each_result(evidence, "O11", _judge_nan)


def _judge_nan(evidence: Evidence, arm: str, role: Role, got: F32) -> Verdict:
    expected = np.isnan(evidence.reference.centre(role))
    spilled = ~expected & evidence.reference.may_overflow(role)
    if role == "output" and "bias" in evidence.tensors:
        spilled = spilled | ~np.isfinite(evidence.tensors["bias"])[None, :]
    if spilled.all():
        return plain("O11", arm, role, "inconclusive", "every element may overflow")
    bad = (np.isnan(got) != expected) & ~spilled
    if not bad.any():
        return plain("O11", arm, role, "ok")
    at = first(bad)
    symptom = "NaN missing" if expected[at] else "NaN from nowhere"
    expect = Is(bits(np.nan)) if expected[at] else between(-np.inf, np.inf)
    return diverged("O11", arm, role, symptom, At(name=role, index=at), number(got[at]), expect)
