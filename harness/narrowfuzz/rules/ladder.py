"""O23: sums of ladder data equal, to the bit, a result that the plan's accumulator may give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from narrowfuzz.numerics import bounds
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.numerics.outcomes import outcomes
from narrowfuzz.numerics.plan import ROLES, Role
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.gemm import NOTHING, interval, observed
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import OneOf, between
from narrowfuzz.trace.trace import Seen, Trace
from narrowfuzz.trace.verdict import Verdict

#: An element is judged if it has at most this many possible results.
MOST = 4
_UNSEEN = Seen()


def check_ladder(evidence: Evidence) -> Iterator[Verdict]:
    """O23: every element is one of the results that the accumulator may give for the observed
    operands, rounded as the plan states."""
    for arm, trace in evidence.traces.items():
        for role in ROLES:
            why = _not_applicable(evidence, trace, role)
            if why is None:
                yield _judge(evidence, arm, trace, role)
            else:
                yield plain("O23", arm, role, "not_applicable", why)


def _not_applicable(evidence: Evidence, trace: Trace, role: Role) -> str | None:
    """Why this GEMM is not judged; None if it is."""
    data, gemm = evidence.case.data, evidence.plan.gemms[role]
    if trace.error is not None or trace.outputs.get(role) is None:
        return ""
    if data.regime != "ladder" or data.gemm != role:
        return "the data are not ladder data for this GEMM"
    if not gemm.accumulator.known:
        return "it is not known how this GEMM adds"
    return None


def _judge(evidence: Evidence, arm: str, trace: Trace, role: Role) -> Verdict:
    a, b = observed(evidence, trace, role)
    if a is None or b is None:
        return plain("O23", arm, role, "inconclusive", trace.unobserved or "not tapped")
    if not _exact_scales(evidence, trace, role):
        return plain("O23", arm, role, "inconclusive", "scales are not powers of two")
    got, accumulator = trace.outputs[role], evidence.plan.gemms[role].accumulator
    sums = outcomes(a, b, accumulator, evidence.reference.least(role))
    lo, hi = _results(evidence, arm, role, sums)
    risky = evidence.reference.may_overflow(role)
    if got.size and risky.all():
        return plain("O23", arm, role, "inconclusive", "every element may overflow")
    judged = ~np.isnan(sums).any(axis=0) & ~risky & (_choices(lo) <= MOST)
    if not judged.any():
        return plain("O23", arm, role, "inconclusive", "too many results are possible")
    bad = judged & ~bounds.contains(lo, hi, got).any(axis=0)
    if bad.any():
        return _diverged(arm, role, got, first(bad), lo, hi)
    decided = (bounds.excludes_zero(lo, hi).all(axis=0) & judged).any()
    return plain("O23", arm, role, "ok" if decided else "inconclusive", "" if decided else NOTHING)


def _exact_scales(evidence: Evidence, trace: Trace, role: Role) -> bool:
    """True if applying the scales rounds nothing: all of them, those of the plan and those that
    were observed, are powers of two."""
    site = trace.main_site(role)
    seen = (_UNSEEN, _UNSEEN) if site is None else (site.a, site.b)
    for side, one in zip(("a", "b"), seen, strict=True):
        quantised = evidence.reference.operand(role, side).quantised
        if quantised is None:
            continue
        for scale in (quantised.scale, one.scale):
            if scale is None or scale.dtype == np.uint8:
                continue
            if scale.dtype.names or (np.frexp(scale)[0] != 0.5).any():
                return False
    return True


def _results(evidence: Evidence, arm: str, role: Role, sums: F64) -> tuple[F64, F64]:
    """Both ends of what the layer may return for each possible sum, [choices, rows, columns]."""
    bias = evidence.tensors.get("bias") if role == "output" else None
    with np.errstate(invalid="ignore"):
        ends = [interval(evidence, arm, role, one, 0.0, bias) for one in sums]
    return np.stack([lo for lo, _ in ends]), np.stack([hi for _, hi in ends])


def _choices(ends: F64) -> Any:
    """How many different results each element may have."""
    ordered = np.sort(ends, axis=0)
    return 1 + (ordered[1:] != ordered[:-1]).sum(axis=0)


def _diverged(arm: str, role: Role, got: F32, at: tuple[int, ...], lo: F64, hi: F64) -> Verdict:
    ends = sorted({(float(x[at]), float(y[at])) for x, y in zip(lo, hi, strict=True)})
    allowed = tuple(between(x, y) for x, y in ends)
    symptom = "wrong sum" if np.isfinite(got[at]) else "not finite"
    here, expect = At(name=role, index=at), OneOf(allowed) if allowed[1:] else allowed[0]
    return diverged("O23", arm, role, symptom, here, number(got[at]), expect)
