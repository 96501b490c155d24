"""O1 self-repeat, O12 checkpoint-equal, O13 recompute-consistency: the same twice is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.oracles.evidence import Evidence
from harness.oracles.oracle import first, number, plain, same_bits
from harness.trace import Seen, Trace
from harness.verdict import Verdict

_ALL = ("output", "grad_input", "grad_weight", "grad_bias")


def check_repeat(evidence: Evidence) -> Iterator[Verdict]:
    """O1: the same arm on the same case, tapped and untapped, leaves equal bits."""
    for arm, trace in evidence.traces.items():
        again = evidence.repeats.get(arm)
        if again is None or trace.error is not None:
            yield plain("O1", arm, "output", "not_applicable")
            continue
        if again.error is not None:
            yield Verdict(
                "O1", arm, "output", "diverged", "raises the second time",
                measured=f"{again.error.type}: {again.error.message[:200]}", allowed="a result",
            )  # fmt: skip
            continue
        yield from _equal_outputs("O1", evidence, trace, again, "differs on repeat")


def check_checkpoint(evidence: Evidence) -> Iterator[Verdict]:
    """O12: in eager, a checkpointed run equals the plain one bit for bit."""
    plain_trace = evidence.traces.get("eager")
    for arm, trace in evidence.traces.items():
        if not arm.startswith("eager+checkpoint"):
            continue
        if plain_trace is None or plain_trace.error is not None or trace.error is not None:
            yield plain("O12", arm, "output", "not_applicable")
            continue
        yield from _equal_outputs("O12", evidence, trace, plain_trace, "differs from no checkpoint")


def _equal_outputs(
    oracle: str, evidence: Evidence, trace: Trace, other: Trace, symptom: str
) -> Iterator[Verdict]:
    arm = trace.arm
    for role in _ALL:
        if evidence.by_chance(role):
            yield plain(oracle, arm, role, "not_applicable", "stochastic rounding")
            continue
        got, want = trace.outputs.get(role), other.outputs.get(role)
        if got is None and want is None:
            continue
        if got is None or want is None:
            yield Verdict(oracle, arm, role, "diverged", "gradient missing in one run")
            continue
        bad = ~same_bits(got, want)
        if not bad.any():
            yield plain(oracle, arm, role, "ok")
            continue
        at = first(bad)
        yield Verdict(
            oracle, arm, role, "diverged", symptom, str(list(at)), number(got[at]),
            number(want[at]), index=at,
        )  # fmt: skip


def check_recompute(evidence: Evidence) -> Iterator[Verdict]:
    """O13: codes and scales seen in recompute equal those seen in forward."""
    for arm, trace in evidence.traces.items():
        if not arm.startswith("eager+checkpoint"):
            continue
        if trace.error is not None or not evidence.plan.gemms["output"].quantised:
            yield plain("O13", arm, "output", "not_applicable")
            continue
        forward, again = trace.at("output", "forward"), trace.at("output", "recompute")
        if forward is None or again is None:
            yield plain("O13", arm, "output", "inconclusive", trace.unobserved or "not tapped")
            continue
        for side, x, y in (("a", forward.a, again.a), ("b", forward.b, again.b)):
            yield _same_seen(arm, side, x, y)


def _same_seen(arm: str, side: str, x: Seen, y: Seen) -> Verdict:
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("scale", x.scale, y.scale),
        ("codes", x.codes, y.codes),
    )
    for what, before, after in pairs:
        assert before is not None and after is not None
        same = before.shape == after.shape and before.dtype == after.dtype
        bad = ~same_bits(before, after) if same else None
        if bad is None or bad.any():
            at = first(bad) if bad is not None else ()
            return Verdict(
                "O13", arm, "output", "diverged", f"{what} differ in recompute",
                f"operand {side}{list(at)}", str(after[at]), str(before[at]), side=side, index=at,
            )  # fmt: skip
    return plain("O13", arm, "output", "ok")
