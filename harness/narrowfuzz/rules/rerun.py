"""Running the eager arm again, and comparing the results of two runs."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, first, number, plain, same_bits
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Same
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import OtherRun, Verdict


def base_of(evidence: Evidence) -> Trace | None:
    """The run of the base arm, or None if its results are not complete."""
    trace = evidence.traces.get(evidence.base)
    return trace if trace is not None and complete(trace) else None


def again(evidence: Evidence, other: OtherRun) -> Trace | None:
    """An eager rerun on other tensors, of another Spec or after an event; None if it failed."""
    assert evidence.rerun is not None
    trace = evidence.rerun(dict(other.tensors), other.spec, other.event)
    return trace if complete(trace) else None


def complete(trace: Trace) -> bool:
    """True for a run that finished with output and both gradients."""
    return trace.error is None and set(ROLES) <= set(trace.outputs)


def compare(
    evidence: Evidence,
    name: str,
    role: str,
    got: Any,
    want: Any,
    symptom: str,
    other: OtherRun,
    at: At = At(),  # noqa: B008
    *,
    times: float = 1.0,
) -> Verdict:
    """The verdict ok if ``got``, of the ``other`` run, has the bits of ``want``, which is ``times``
    the array of the case's own run; else a divergence at the first element that differs. ``at`` is
    the address of the array, by default the role's result. Results that are zero in both runs are
    inconclusive: they do not show how one depends on the other."""
    bad = ~same_bits(got, want)
    if not bad.any():
        if not at.side and not np.any(want):
            return plain(name, evidence.base, role, "inconclusive", "zeros in both runs")
        return plain(name, evidence.base, role, "ok")
    index = first(bad)
    place = msgspec.structs.replace(at, name=at.name or role, index=index)
    there = msgspec.structs.replace(place, run=other.name)
    actual, expect = number(got[index]), Same(place, number(want[index]), times)
    return diverged(name, evidence.base, role, symptom, there, actual, expect, runs=(other,))
