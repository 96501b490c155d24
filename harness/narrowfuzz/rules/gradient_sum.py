"""O21: a weight's gradient is the sum of the contributions of all calls of its linear.

If a linear is called once, O15 judges its gradient by the operands that were multiplied. If it is
called several times, autograd adds the contributions of the calls, which cannot be observed one by
one: the sum is judged by the operands of all calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from narrowfuzz.case.events import last_gradients
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F64, FORMATS, round_to
from narrowfuzz.operators.operator import Expected
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.expected import beyond, outside, passed
from narrowfuzz.rules.gemm import centre_and_radius, interval, observed, rescaled
from narrowfuzz.rules.layers import given_of, layer_evidence
from narrowfuzz.rules.rule import first, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.trace import LayerCall, Trace
from narrowfuzz.trace.verdict import Verdict

_NAME, _ROLE = "O21", "grad_parameter"


def check_gradient_sum(evidence: Evidence) -> Iterator[Verdict]:
    """Judges the weight of every linear that was called several times in the last step."""
    if not evidence.plain or not evidence.spec.trains:
        yield plain(_NAME, evidence.base, _ROLE, "not_applicable")
        return
    for arm, trace in evidence.plain.items():
        used = {n: calls for n, calls in _last_step(evidence, trace).items() if len(calls) > 1}
        if not used:
            yield plain(_NAME, arm, _ROLE, "not_applicable", "no linear is called twice in a step")
        for layer, calls in used.items():
            yield _judge(evidence, trace, layer, calls)


def _last_step(evidence: Evidence, trace: Trace) -> dict[str, list[LayerCall]]:
    """The calls of each linear in the forwards that contributed to the final gradients, if all of
    these calls got a gradient back. Calls with a frozen weight are omitted, and so are linears
    whose weights are used elsewhere. Empty if a graph ran backward twice, since only its last
    gradient is observed."""
    made = last_gradients(evidence.spec.training)
    if len(set(made)) < len(made):
        return {}
    calls: dict[str, list[LayerCall]] = defaultdict(list)
    for call in trace.calls:
        trained = "weight" not in call.frozen  # else its product is no part of the gradient
        if call.phase == "forward" and call.forward in made and trained:
            calls[call.module].append(call)
    used = MODELS[evidence.spec.model].gradients.elsewhere
    shared = {*evidence.tied, *evidence.tied.values(), *used}
    return {
        layer: mine
        for layer, mine in calls.items()
        if f"{layer}.weight" not in shared and all("grad_output" in c.tensors for c in mine)
    }


def _judge(evidence: Evidence, trace: Trace, layer: str, calls: Sequence[LayerCall]) -> Verdict:
    """Judges the sum by its interval: that of each call by bound 3.2, then additions in any order.

    Proof. The share of call i lies in [lo_i, hi_i]. n - 1 rounded additions in any order err by at
    most gamma_{n-1} of the sum of magnitudes (Higham 4.2), with the unit roundoff of the narrowest
    dtype of parameter and calls, and the stored sum is one more rounding of it.
    """
    name = f"{layer}.weight.grad"
    arm, got = trace.arm, trace.outputs.get(name)
    if got is None:
        return plain(_NAME, arm, _ROLE, "not_applicable", "the weight has no gradient")
    shares = [_share(evidence, arm, call) for call in calls]
    seen = [share for share in shares if share is not None]
    if len(seen) < len(shares):
        return plain(_NAME, arm, _ROLE, "inconclusive", "operands were not seen")
    dtype = FORMATS[evidence.spec.dtype]
    unit = max(dtype.unit_roundoff, *(FORMATS[call.dtype].unit_roundoff for call in calls))
    with np.errstate(all="ignore"):
        low = np.sum([share.low for share in seen], axis=0)
        high = np.sum([share.high for share in seen], axis=0)
        size = np.sum([np.maximum(np.abs(s.low), np.abs(s.high)) for s in seen], axis=0)
        slack = len(seen) * unit / (1.0 - len(seen) * unit) * size
        lo, hi = (round_to(end, dtype, overflow="ieee") for end in (low - slack, high + slack))
        skip = np.logical_or.reduce([share.unknown for share in seen]) | ~(size < dtype.max * 0.5)
        may = Expected((low + high) / 2.0, (high - low) / 2.0 + slack, lo, hi, skip)
    bad = outside(may, got)
    if not bad.any():
        return passed(_NAME, arm, _ROLE, may)
    excused = [share.rescaled for share in seen if share.rescaled is not None]
    if excused and not (bad & ~np.logical_or.reduce(excused)).any():
        return plain(_NAME, arm, _ROLE, "ok").known(evidence.deviations["rescale_overflow"])
    symptom, at = "is not the sum of its layer's calls", At(name=name, index=first(bad))
    given = tuple(g for call in calls for g in given_of(call, "grad_weight"))
    return beyond(_NAME, arm, _ROLE, symptom, at, got, may, given=given)


class _Share(NamedTuple):
    """The interval of one call's contribution to the weight's gradient."""

    low: F64
    high: F64
    #: True where nothing is known of the contribution.
    unknown: Any
    #: True where the product of both inverse scales may be Inf; None if the reference does not
    #: follow that deviation.
    rescaled: Any


def _share(evidence: Evidence, arm: str, call: LayerCall) -> _Share | None:
    """The call's share; None if its operands were not observed."""
    layer = layer_evidence(evidence, arm, call)
    a, b = observed(layer, layer.traces[arm], "grad_weight")
    if a is None or b is None:
        return None
    centre, radius = centre_and_radius(layer, "grad_weight", a, b)
    lo, hi = interval(layer, arm, "grad_weight", centre, radius, None)
    unknown = layer.reference.may_overflow("grad_weight") | np.isnan(centre)
    return _Share(lo, hi, unknown, rescaled(layer, "grad_weight"))
