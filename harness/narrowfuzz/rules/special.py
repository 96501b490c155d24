"""O10 finite and O11 nan-provenance: where Inf and NaN may, and must, come out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, between, bits
from narrowfuzz.trace.verdict import Verdict


def check_finite(evidence: Evidence) -> Iterator[Verdict]:
    """O10: where bound 3.3 keeps the result below the format's maximum, it is finite."""
    largest = FORMATS[evidence.spec.dtype].max
    for arm, trace in evidence.traces.items():
        for role in ROLES:
            got = trace.outputs.get(role)
            if trace.error is not None or got is None:
                yield plain("O10", arm, role, "not_applicable")
                continue
            if evidence.plan.gemms[role].transformed:
                yield plain("O10", arm, role, "not_applicable", "operands are transformed")
                continue
            centre, radius = evidence.reference.layer(role)
            with np.errstate(invalid="ignore"):
                reach = np.abs(centre) + radius
                must = (reach < 0.99 * largest) & ~evidence.reference.may_overflow(role)
            if role == "output" and "bias" in evidence.tensors:
                with np.errstate(invalid="ignore"):
                    must &= np.abs(evidence.tensors["bias"])[None, :] < 0.005 * largest
            if got.size and not must.any():
                yield plain("O10", arm, role, "inconclusive", "no element is certainly in range")
                continue
            bad = must & ~np.isfinite(got)
            if not bad.any():
                yield plain("O10", arm, role, "ok")
                continue
            at = first(bad)
            here, actual, expect = (
                At(name=role, index=at),
                number(got[at]),
                between(-largest, largest),
            )
            factor = float(reach[at]) / largest
            yield diverged("O10", arm, role, "not finite", here, actual, expect, factor=factor)


def check_nan_provenance(evidence: Evidence) -> Iterator[Verdict]:
    """O11: a result is NaN exactly where that of the plan, executed with IEEE rules, is NaN.

    Elements whose partial sums may overflow are not judged: Inf - Inf depends on the order of sums.
    A non-finite operand makes an element's reach infinite, so the plan's own NaNs are added back.
    """
    for arm, trace in evidence.traces.items():
        for role in ROLES:
            got = trace.outputs.get(role)
            if trace.error is not None or got is None:
                yield plain("O11", arm, role, "not_applicable")
                continue
            if evidence.plan.gemms[role].transformed:
                yield plain("O11", arm, role, "not_applicable", "operands are transformed")
                continue
            expected = np.isnan(evidence.reference.centre(role))
            spilled = ~expected & evidence.reference.may_overflow(role)
            if role == "output" and "bias" in evidence.tensors:
                spilled = spilled | ~np.isfinite(evidence.tensors["bias"])[None, :]
            if spilled.all():
                yield plain("O11", arm, role, "inconclusive", "every element may overflow")
                continue
            bad = (np.isnan(got) != expected) & ~spilled
            if not bad.any():
                yield plain("O11", arm, role, "ok")
                continue
            at = first(bad)
            symptom = "NaN missing" if expected[at] else "NaN from nowhere"
            expect = Is(bits(np.nan)) if expected[at] else between(-np.inf, np.inf)
            here, actual = At(name=role, index=at), number(got[at])
            yield diverged("O11", arm, role, symptom, here, actual, expect)
