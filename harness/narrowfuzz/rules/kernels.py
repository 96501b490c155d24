"""Checks of the kernels that a model's compiled graphs call: fused code has no layers to judge.

Every product must lie within bound 3.2 of the operands that the kernel really got. A weight is a
graph input, so its quantised copy must be the plan's, under any compiler setting: to this extent O2
and O3 still apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np

from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.accumulator import Accumulators
from narrowfuzz.numerics.formats import F32
from narrowfuzz.operators import product
from narrowfuzz.operators.linear import Operand
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.expected import beyond, outside, passed
from narrowfuzz.rules.quantiser import judge_cast, judge_scale
from narrowfuzz.rules.rule import first, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.trace import Multiplied, Seen, Trace
from narrowfuzz.trace.verdict import Verdict

T = TypeVar("T")
#: The number of calls that are judged per arm and case if the case has a focus.
CALLS = 6
#: The number of weights whose quantised copy is judged, per arm and case, if the case has a focus.
COPIES = 2
#: The symptom of a product outside its bound.
WRONG_PRODUCT = "kernel multiplies wrongly"
#: The smallest cosine with a weight at which a dequantised operand counts as the weight's copy:
#: rounding leaves a copy above 0.9, and a random matrix of 256 elements lies eight standard
#: deviations below this. Codes need no similarity: in a forward only converted linears multiply by
#: codes.
_A_COPY = 0.5


def check_kernels(evidence: Evidence) -> Iterator[Verdict]:
    """O5 and O15 for the products of compiled arms."""
    for arm, trace in _compiled(evidence):
        if not trace.multiplied:
            yield plain("O5", arm, "output", "inconclusive", "no kernel was seen to multiply")
        for one in focused_calls(trace.multiplied, evidence.focus):
            yield _multiply(evidence.accumulators, arm, one)


def _compiled(evidence: Evidence) -> Iterator[tuple[str, Trace]]:
    for arm, trace in evidence.traces.items():
        if evidence.compiled(arm) and trace.error is None:
            yield arm, trace


def focused_calls(items: tuple[T, ...], focus: int | None) -> tuple[T, ...]:
    """``CALLS`` of an arm's calls, starting from the one that ``focus`` selects; all if None."""
    if focus is None:
        return items
    start = focus % max(1, len(items))
    return (items[start:] + items[:start])[:CALLS]


def _multiply(accumulators: Accumulators, arm: str, one: Multiplied) -> Verdict:
    rule, role = ("O5", "output") if one.phase == "forward" else ("O15", "gradient")
    may = product.expected(one, accumulators)
    bad = outside(may, one.result)
    if not bad.any():
        return passed(rule, arm, role, may)
    at = At(what="product", phase=one.phase, index=first(bad))
    return beyond(rule, arm, role, WRONG_PRODUCT, at, one.result, may)


def check_weight_copies(evidence: Evidence) -> Iterator[Verdict]:
    """O2 and O3 on the weights of compiled arms: each forward GEMM's second operand is the plan's
    quantised copy of one of the model's weights."""
    if not evidence.plan.quantised or evidence.converted_plan_of is None or evidence.spec.optimizes:
        return  # after an optimizer step the weights are no longer the case's
    for arm, trace in _compiled(evidence):
        forward = tuple(m for m in trace.multiplied if m.phase == "forward")
        judged, most = 0, len(forward) if evidence.focus is None else COPIES
        for one in focused_calls(forward, evidence.focus):
            verdicts = list(_weight(evidence, arm, one.b))
            yield from verdicts
            judged += any(v.status in ("ok", "diverged") for v in verdicts)
            if judged == most:
                break


def _weight(evidence: Evidence, arm: str, seen: Seen) -> Iterator[Verdict]:
    array = seen.codes if seen.codes is not None else seen.values
    assert array is not None
    weights = {
        name: t
        for name, t in evidence.tensors.items()
        if name not in ("input", "grad_output") and t.shape == array.shape
    }
    converted = _converted(evidence)
    candidates = [_of_weight(evidence, name, t) for name, t in weights.items() if name in converted]
    if any(np.array_equal(array, t) for name, t in weights.items() if name not in converted):
        yield plain("O2", arm, "output", "not_applicable", "this layer is not quantised")
        return
    if not candidates:
        yield plain("O2", arm, "output", "inconclusive", "no weight of that shape")
        return
    judged = [list(_judge_copy(e, name, arm, seen)) for name, e in candidates]
    clean = [vs for vs in judged if all(v.status != "diverged" for v in vs)]
    if clean:
        yield from clean[0]
        return
    # none fits: judge it as the copy of the weight that it is most similar to
    likeness = [_likeness(seen, e) for _, e in candidates]
    if seen.codes is None and max(likeness) < _A_COPY:
        why = "it matches no weight of its shape: it is another operand of the model"
        yield plain("O2", arm, "output", "inconclusive", why)
        return
    nearest = int(np.argmax(likeness))
    elsewhere = MODELS[evidence.spec.model].gradients.elsewhere
    if seen.codes is None and candidates[nearest][0] in elsewhere:
        why = "a weight that the model also uses elsewhere, where it need not be quantised"
        yield plain("O2", arm, "output", "inconclusive", why)
        return
    yield from judged[nearest]


def _converted(evidence: Evidence) -> frozenset[str]:
    """All names of the weights of layers that were converted and that eager runs called; the names
    of all tensors if no census was taken. A module of which only the weight is read, such as
    nn.MultiheadAttention's out_proj, quantises nothing."""
    census = next((t.census for t in evidence.traces.values() if t.census is not None), None)
    if census is None:
        return frozenset(evidence.tensors)
    called = {call.module for trace in evidence.plain.values() for call in trace.calls}
    names = {f"{module}.weight" for module in census.converted if module in called or not called}
    return frozenset(names | {evidence.tied[name] for name in names if name in evidence.tied})


def _of_weight(evidence: Evidence, name: str, weight: F32) -> tuple[str, Evidence]:
    spec = Spec(
        recipe=evidence.spec.recipe,
        backend=evidence.spec.backend,
        m=1,
        k=weight.shape[1],
        n=weight.shape[0],
        dtype=evidence.spec.dtype,
    )
    assert evidence.converted_plan_of is not None
    nothing = np.zeros((1, weight.shape[1]), dtype=np.float32)
    case = msgspec.structs.replace(evidence.case, spec=spec)
    tensors = {"input": nothing, "weight": weight}
    return name, replace(
        evidence, case=case, plan=evidence.converted_plan_of(spec), tensors=tensors
    )


def _judge_copy(evidence: Evidence, name: str, arm: str, seen: Seen) -> Iterator[Verdict]:
    operand: Operand = evidence.reference.operand("output", "b")
    if operand.plan.format is None:
        return
    for judge in (judge_scale, judge_cast):
        verdict = judge(evidence, arm, "output", "b", seen, operand)
        at = msgspec.structs.replace(verdict.at, layer=name.removesuffix(".weight"))
        yield replace(verdict, at=at)


def _likeness(seen: Seen, evidence: Evidence) -> float:
    """The cosine between an observed operand and a weight, which no scale changes: near 1 for a
    copy of the weight, however wrongly rounded or scaled, and near 0 for any other matrix."""
    with np.errstate(all="ignore"):
        got, weight = (
            np.nan_to_num(t, posinf=0.0, neginf=0.0).ravel().astype(np.float64)
            for t in (product.dequantised(seen), evidence.tensors["weight"])
        )
        size = float(np.linalg.norm(got)) * float(np.linalg.norm(weight))
        return float(got @ weight) / size if 0.0 < size < np.inf else 0.0
