"""The guilty tensor of a divergence, its expected values, and the tolerance of each element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.numerics.plan import ROLES, Role
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.operators.operator import Expected
from narrowfuzz.operators.sum import summed
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.gemm import centre_and_radius, interval, observed
from narrowfuzz.rules.layers import layer_evidences
from narrowfuzz.rules.repeat import AGAIN
from narrowfuzz.trace.expect import Near, Same, read
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.pair import Compared, exactly
from narrowfuzz.triage.pair_operands import operand_pair, recompute_pair


def compared(evidence: Evidence, verdict: Verdict) -> Compared | None:
    """The guilty tensor beside its expected values; None if the verdict is not a divergence or is
    about no tensor of this evidence."""
    found = guilty(evidence, verdict)
    compare = _BY_RULE.get(verdict.rule)
    if compare is None or verdict.status != "diverged" or found is None:
        return None
    return compare(*found, verdict)


def guilty(evidence: Evidence, verdict: Verdict) -> tuple[Evidence, Trace] | None:
    """The evidence that the rule checked, of a model's layer or of the whole case, and the trace of
    the guilty arm. None if that arm has no trace there, or failed."""
    at = verdict.at
    if at.layer and verdict.rule in _OF_LINEARS:
        calls = (
            (place, seen)
            for place, seen in layer_evidences(evidence)
            if (place.layer, place.call) == (at.layer, at.call)
        )
        found = next((seen for _, seen in calls if verdict.arm in seen.traces), None)
    else:
        found = evidence
    trace = None if found is None else found.traces.get(verdict.arm)
    return None if found is None or trace is None or trace.error else (found, trace)


def _result(evidence: Evidence, trace: Trace, verdict: Verdict) -> Compared | None:
    """A GEMM's result beside the interval that a bound proves, or beside the exact value for the
    rules that require one (O7, O11)."""
    name = verdict.at.name
    role = next((role for role in ROLES if role == name), None)
    got = trace.outputs.get(name)
    if got is None or role is None or verdict.at.what != "result":
        return None
    interval_of = _INTERVALS[verdict.rule](evidence, trace, role)
    if interval_of is None:
        return None
    against, centre, radius = interval_of
    bias = evidence.tensors.get("bias") if role == "output" else None
    lo, hi = interval(evidence, trace.arm, role, centre, radius, bias)
    skip = evidence.reference.may_overflow(role)
    if bias is not None:  # where the bias is NaN or Inf, so may the result be
        skip = skip | ~np.isfinite(bias)[None, :]
    if verdict.rule in ("O7", "O11"):
        nan = np.isnan(centre)
        # O11 is only about NaN: any number is as good as another
        number = got if verdict.rule == "O11" else np.clip(got, lo, hi)
        wanted = np.where(nan, np.nan, np.where(np.isnan(got), lo, number))
        one = exactly(name, against, got, wanted, FORMATS[evidence.spec.dtype])
        return None if one is None else replace(one, skip=skip & ~nan)
    middle = centre if bias is None else centre + bias
    unsaid = skip | np.isnan(lo) | np.isnan(hi)
    return _bounded(name, against, got, middle, radius, (lo, hi), unsaid)


def _bounded(
    name: str, against: str, got: Any, middle: F64, radius: Any, ends: Any, skip: Any
) -> Compared:
    """The comparison of a result with an interval. An element may be off by one unit: the distance
    from the middle to the end of the interval on the element's side, or the radius where rounding
    made the interval narrower than that."""
    lo, hi = ends
    unit = np.maximum(radius, np.where(got > middle, hi - middle, middle - lo))
    named = "multiples of the tolerance, which is the most that rounding can explain"
    return Compared(name, against, got, middle, unit, named, exact=False, skip=skip)


def _of_multiplied(evidence: Evidence, trace: Trace, role: Role) -> tuple[str, Any, Any] | None:
    a, b = observed(evidence, trace, role)
    if a is None or b is None:
        return None
    return "the product of what was multiplied", *centre_and_radius(evidence, role, a, b)


def _of_layer(evidence: Evidence, trace: Trace, role: Role) -> tuple[str, Any, Any] | None:
    return "the product before anything is quantised", *evidence.reference.layer(role)


def _of_plan(evidence: Evidence, trace: Trace, role: Role) -> tuple[str, Any, Any] | None:
    return "the exact result by the recipe's rules", evidence.reference.centre(role), 0.0


#: Rule -> a function that gives what the rule compares results with, in words, and the middle and
#: the radius of the interval.
_INTERVALS: dict[str, Callable[[Evidence, Trace, Role], tuple[str, Any, Any] | None]] = {
    "O5": _of_multiplied,
    "O15": _of_multiplied,
    "O6": _of_layer,
    "O10": _of_layer,
    "O7": _of_plan,
    "O11": _of_plan,
}


def _bias_gradient(evidence: Evidence, trace: Trace, verdict: Verdict) -> Compared | None:
    got, grad = trace.outputs.get("grad_bias"), evidence.tensors.get("grad_output")
    if got is None or grad is None:
        return None
    may = summed(grad.astype(np.float64), (0,), FORMATS[evidence.spec.dtype])
    return _expected("grad_bias", "the sum of the output gradients", got, may)


def _operator(evidence: Evidence, trace: Trace, verdict: Verdict) -> Compared | None:
    """A result of an operator's call beside the interval of expected values."""
    for call in trace.operators:
        if (call.operator, call.index) == (verdict.at.name, verdict.at.call):
            operator = OPERATORS[call.operator]
            name = verdict.at.result or operator.results[0]
            return _expected(name, "float64", call.outputs[name], operator.expected(call)[name])
    return None


def _expected(name: str, against: str, got: Any, may: Expected) -> Compared:
    unsaid = may.unknown | np.isnan(may.lo)
    return _bounded(name, against, got, may.centre, may.radius, (may.lo, may.hi), unsaid)


def _two_runs(evidence: Evidence, trace: Trace, verdict: Verdict) -> Compared | None:
    """A result of two arms, or of two runs of one arm, which must have the same bits."""
    name, expect = verdict.at.name, verdict.expect
    if not isinstance(expect, Same) or verdict.at.what != "result" or verdict.at.layer:
        return None  # results of modules inside the model are not recorded
    there = expect.at.run
    other = evidence.repeats.get(trace.arm) if there == AGAIN else evidence.traces.get(there)
    if other is None or name not in trace.outputs or name not in other.outputs:
        return None
    dtype = FORMATS[evidence.spec.dtype]
    return exactly(name, there, trace.outputs[name], other.outputs[name], dtype)


def _ratio(evidence: Evidence, trace: Trace, verdict: Verdict) -> Compared | None:
    """A result beside float64, in units of the largest allowed root-mean-square error."""
    name, near = verdict.at.name, verdict.expect
    if not isinstance(near, Near) or evidence.twin is None or name not in trace.outputs:
        return None
    named = "multiples of the error that is allowed in root mean square"
    return Compared(
        name,
        "the same in float64",
        trace.outputs[name],
        evidence.exact[name],
        read(near.limit),
        named,
        exact=False,
    )


#: Rules that check a model's linears one by one.
_OF_LINEARS = frozenset({"O2", "O3", "O4", "O16", *_INTERVALS})
_BY_RULE: dict[str, Callable[[Evidence, Trace, Verdict], Compared | None]] = {
    **dict.fromkeys(_INTERVALS, _result),
    **dict.fromkeys(("O2", "O3", "O4"), operand_pair),
    **dict.fromkeys(("O1", "O8", "O12"), _two_runs),
    "O9": _ratio,
    "O13": recompute_pair,
    "O16": _bias_gradient,
    "O25": _operator,
}
