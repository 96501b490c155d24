"""O22: backward belongs to the forward that was run.

The last linear of a model is y = h W^T + b, so for each of its output features n, whatever h was,

    sum_m g[m, n] y[m, n] = sum_k grad_W[n, k] W[n, k] + grad_b[n] b[n].

Both sides come from one run, so no other run is needed for comparison. So this also judges models
that draw random numbers, for which a compiled run draws other numbers than eager. If backward
recomputes h from other random numbers, or rounds it otherwise, the sides differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from narrowfuzz.numerics.formats import F64, FORMATS
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import first, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Own, Within, bits, number
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

_NAME, _ROLE = "O22", "grad_parameter"
#: The tolerance of each product, in unit roundoffs of the results' dtype: two each for y, grad_W,
#: the bias and h.
ROUNDINGS = 8.0
#: The smallest tolerance, relative to the magnitudes: sums in fp32 may be off by that where
#: products cancel.
FLOOR = 2.0**-12


def check_own_backward(evidence: Evidence) -> Iterator[Verdict]:
    """Judges every arm of an unquantised model whose output is made by one linear."""
    why = _why_not(evidence)
    for arm, trace in evidence.traces.items():
        if trace.error is not None or why:
            yield plain(_NAME, arm, _ROLE, "not_applicable", why)
        else:
            yield _judge(evidence, arm, trace)


def _why_not(evidence: Evidence) -> str:
    spec = evidence.spec
    if not evidence.output_linear:
        return "no linear makes the output by itself"
    if evidence.plan.quantised:
        return "forward and backward quantise different operands"
    if not spec.trains or spec.scheduled:
        return "not one backward"
    return ""


def sides(results: Any, tensors: Any, last: str, tiny: float = 0.0) -> tuple[F64, F64, F64] | None:
    """Both sums and the sum of magnitudes, per output feature; None if the weight's gradient is
    missing. In the magnitudes results count at least ``tiny``, the dtype's smallest normal number,
    since the rounding error of smaller ones is no smaller."""
    grad = results.get(f"{last}.weight.grad")
    if grad is None:
        return None
    held = (results["output"], tensors["grad_output"], tensors[f"{last}.weight"], grad)
    y, g, w, grad = (np.asarray(t, np.float64) for t in held)
    bias, grad_bias = tensors.get(f"{last}.bias"), results.get(f"{last}.bias.grad")
    with np.errstate(all="ignore"):
        output, shares = g * y, [grad * w]
        sizes = [np.abs(g) * np.maximum(np.abs(y), tiny)]
        sizes.append((np.maximum(np.abs(grad), tiny) * np.abs(w)).T)
        if bias is not None and grad_bias is not None:
            grad_bias = np.asarray(grad_bias, np.float64)
            shares.append((grad_bias * bias)[:, None])
            sizes.append(np.maximum(np.abs(grad_bias), tiny)[None] * np.abs(bias))
        right = np.sum([share.sum(axis=1) for share in shares], axis=0)
        size = np.sum([s.sum(axis=0) for s in sizes], axis=0)
        return output.sum(axis=0), right, size


def allowed(dtype: str, *, autocast: bool) -> float:
    """The allowed difference of the sides, in units of the sum of magnitudes."""
    unit = FORMATS["bf16" if autocast else dtype].unit_roundoff
    return max(ROUNDINGS * unit, FLOOR)


def largest(dtype: str) -> float:
    """The sum of magnitudes from which on a partial sum may have left the dtype's range."""
    return FORMATS[dtype].max * 2.0**-10


def _judge(evidence: Evidence, arm: str, trace: Trace) -> Verdict:
    tiny = FORMATS[evidence.spec.dtype].min_normal
    found = sides(trace.outputs, evidence.tensors, evidence.output_linear, tiny)
    at = At(name=f"{evidence.output_linear}.weight.grad")
    nothing = plain(_NAME, arm, _ROLE, "ok")
    limit = allowed(evidence.spec.dtype, autocast=bool(evidence.spec.narrowed))
    return compared(nothing, "belongs to another forward", at, found, evidence.spec.dtype, limit)


def compared(
    passed: Verdict,
    symptom: str,
    at: At,
    found: tuple[F64, F64, F64] | None,
    dtype: str,
    allowed: float,
) -> Verdict:
    """The verdict on the sides that were ``found`` (see ``sides``), which may differ by ``allowed``
    times the magnitudes: ``passed``, or a divergence at a row of the last weight's gradient, whose
    rows are the output features."""
    if found is None:
        return replace(passed, status="not_applicable", why="the last weight has no gradient")
    left, right, size = found
    with np.errstate(all="ignore"):
        limit = allowed * size
        judged = np.isfinite(size) & (size < largest(dtype)) & (size > 2.0**-60)
        bad = judged & ~(np.abs(left - right) <= limit)
        wrong = judged & (np.abs(left) > limit)
    if left.size and not judged.any():
        return replace(passed, status="inconclusive", why="sums out of range")
    if not bad.any():
        why = "" if wrong.any() else "every sum may be 0"
        return replace(passed, status="inconclusive", why=why) if why else passed
    n = first(bad)
    interval = Within(bits(left[n] - limit[n]), bits(left[n] + limit[n]))
    return replace(
        passed,
        status="diverged",
        symptom=symptom,
        at=msgspec.structs.replace(at, index=n),
        got=f"gradient times weight {number(right[n])} in sum",
        # of a sum over the row, not of an element that a script could look up
        expect=Own(str(interval)),
        factor=float(abs(left[n] - right[n]) / limit[n]),
    )
