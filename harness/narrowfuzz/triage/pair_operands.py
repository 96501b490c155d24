"""The guilty operand of a rule about casts beside its expected values, from the plan or forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowfuzz.numerics.formats import FORMATS, Format, decode
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.quantiser import expected_codes, expected_scale
from narrowfuzz.rules.recompute import same_input
from narrowfuzz.trace.meaning import operand as operand_words
from narrowfuzz.trace.trace import Seen, Trace, repeated
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.pair import Compared, exactly


def seen_operand(trace: Trace, verdict: Verdict) -> Seen | None:
    """The operand that a verdict about a cast points at, as its GEMM received it; None if that was
    not seen."""
    role = next((role for role in ROLES if role == verdict.at.name), None)
    site = None if role is None else trace.main_site(role)
    if site is None or not verdict.at.side:
        return None
    return site.a if verdict.at.side == "a" else site.b


def operand_pair(evidence: Evidence, trace: Trace, verdict: Verdict) -> Compared | None:
    """What the verdict is about of an operand (codes, scale, amax, values) beside what the plan
    computes; codes are expected for the scale that was seen."""
    at, seen = verdict.at, seen_operand(trace, verdict)
    if seen is None:
        return None
    role = next(role for role in ROLES if role == at.name)
    operand = evidence.reference.operand(role, at.side)
    if operand.quantised is None or operand.plan.format is None:
        return None
    tensor, against = f"{at.what} of {operand_words(at)}", "what the recipe's rules give"
    if at.what == "values":
        against = "what the recipe's casts give"
        planned = np.asarray(evidence.reference.values(role, at.side), np.float32)
        return exactly(tensor, against, seen.values, planned, FORMATS["fp32"])
    if at.what == "amax":
        return exactly(tensor, against, seen.amax, operand.quantised.amax, FORMATS["fp32"])
    if at.what == "scale" and seen.scale is not None:
        return _scales(tensor, against, seen.scale, expected_scale(seen, operand))
    scale = evidence.seen_scale(role, at.side, seen)
    if at.what != "codes" or scale is None or seen.codes is None:
        return None
    fmt = operand.plan.format
    wanted = decode(expected_codes(scale, operand), fmt)
    against += " with the scale that was used"
    return exactly(tensor, against, decode(seen.codes, fmt), wanted, fmt)


def _scales(tensor: str, against: str, got: Any, expected: Any) -> Compared | None:
    """Scales as numbers: exponents for scales that are bytes, the block's scale for scales of two
    levels."""
    if got.dtype != expected.dtype:
        return None
    if got.dtype.names:
        fmt = FORMATS["e4m3fn"]
        return exactly(
            tensor, against, decode(got["block"], fmt), decode(expected["block"], fmt), fmt
        )
    if got.dtype == np.uint8:
        named = "powers of two, the steps of a scale's byte"
        bytes_, wanted = got.astype(np.float64), expected.astype(np.float64)
        return Compared(tensor, against, bytes_, wanted, 1.0, named)
    return exactly(tensor, against, got, expected, FORMATS["fp32"])


@dataclass(frozen=True)
class Recomputed:
    """One operand in a forward and in its recompute, and the tensors that the layer was given."""

    before: Seen
    after: Seen
    #: The tensors that the layer was given in the forward, and those in the recompute.
    tensors: dict[str, Any]
    again: dict[str, Any]


def recomputed(evidence: Evidence, trace: Trace, verdict: Verdict) -> Recomputed | None:
    """The operand that a verdict about a recompute compares; None if it was not seen, and on
    compiled arms."""
    at, side = verdict.at, verdict.at.side or "a"
    if evidence.compiled(trace.arm):
        return None
    if not trace.calls:
        forward, again = trace.at("output", "forward"), trace.at("output", "recompute")
        if forward is None or again is None:
            return None
        tensors = evidence.tensors
        return Recomputed(getattr(forward, side), getattr(again, side), tensors, tensors)
    for first, later in repeated(trace.calls, same_input):
        if (later.module, later.index) == (at.layer, at.call):
            before, after = (
                getattr(c.sites[0], side) if c.sites else Seen() for c in (first, later)
            )
            return Recomputed(before, after, first.tensors, later.tensors)
    return None


def recompute_pair(evidence: Evidence, trace: Trace, verdict: Verdict) -> Compared | None:
    at, pair = verdict.at, recomputed(evidence, trace, verdict)
    if pair is None:
        return None
    against = "what forward used"
    if at.what == "source":
        before, after = pair.tensors.get(at.name), pair.again.get(at.name)
        return exactly(at.name, against, after, before, FORMATS[evidence.spec.dtype])
    tensor = f"{at.what} of {operand_words(at)} in the recompute"
    before, after = (getattr(seen, at.what, None) for seen in (pair.before, pair.after))
    if before is None or after is None or before.shape != after.shape:
        return None
    if at.what == "scale":
        return _scales(tensor, against, after, before)
    fmt = format_of(evidence, pair.before, at.side) if at.what == "codes" else FORMATS["fp32"]
    if fmt is None:
        return None
    if at.what == "codes":
        before, after = decode(before, fmt), decode(after, fmt)
    return exactly(tensor, against, after, before, fmt)


def format_of(evidence: Evidence, seen: Seen, side: str) -> Format | None:
    """The format of an operand of the output's GEMM: the one that was seen, or else the planned."""
    gemm = evidence.plan.gemms["output"]
    return FORMATS.get(seen.format) or (gemm.a if side == "a" else gemm.b).format
