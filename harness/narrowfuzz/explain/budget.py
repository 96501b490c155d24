"""The error budget of a wrong result: how much of its distance from the exact result each step of
the computation adds, from quantising the operands to what the finding's arm does differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.case.kind import CONVERTED, LINEAR, kind_of
from narrowfuzz.case.ladder import base_of
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.numerics import bounds, reference
from narrowfuzz.numerics.formats import F64
from narrowfuzz.numerics.plan import ROLES, OperandPlan, Plan, Role
from narrowfuzz.numerics.scales import Fp32Scale
from narrowfuzz.operators.linear import single_reference
from narrowfuzz.report.causes import Budget, Part
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.gemm import observed
from narrowfuzz.rules.layers import layer_evidence
from narrowfuzz.trace.verdict import Verdict

_NOT_THE_PLANS = "operands that differ from the recipe's"
#: A part of the error, in words, and the difference that it makes to every element.
_Step = tuple[str, F64]


def budget(judge: Judge, case: Case, verdict: Verdict, arm: str) -> Budget | None:
    """The budget of one result of this case on ``arm``: of the result that ``verdict`` is about, or
    else of the one with the largest error. None where nothing is compared with an exact result:
    cases on ranks, a library's own layers, random numbers, results that are not finite."""
    if kind_of(case.spec) not in CONVERTED:
        return None
    base = base_of(case.spec).name
    evidence = judge.observe(case, frozenset({base, arm}), repeat=False)
    traces = evidence.traces
    if any(name not in traces or traces[name].error is not None for name in (base, arm)):
        return None
    if kind_of(case.spec) is LINEAR:
        found = _of_linear(evidence, verdict, base, arm)
    elif arm == base and verdict.at.layer:
        found = _of_call(evidence, verdict, arm)
    else:
        found = _of_model(evidence, verdict, base, arm)
    return max(found, key=_error, default=None)


def result_of(verdict: Verdict) -> str:
    """The name of the result that a verdict is about, be it by an operand of its product."""
    return verdict.at.name or verdict.role


def exact_results(evidence: Evidence) -> dict[str, F64]:
    """What the results of a case would be without rounding, by name: those of a linear from its
    tensors, those of a model from a float64 run. Empty if there is none, as with random numbers."""
    if kind_of(evidence.spec) is not LINEAR:
        return {} if evidence.twin is None else evidence.exact
    found: dict[str, F64] = {role: evidence.reference.layer(role)[0] for role in ROLES}
    if (bias := evidence.tensors.get("bias")) is not None:
        found["output"] = found["output"] + bias.astype(np.float64)
    return found


def _error(found: Budget) -> float:
    return sum(part.share for part in found.parts) if found.bound else found.parts[-1].size


def _of_call(evidence: Evidence, verdict: Verdict, arm: str) -> Iterator[Budget]:
    """The budgets of the products of the call that the verdict is about."""
    for call in evidence.traces[arm].calls:
        if (call.module, call.index, call.phase) == (verdict.at.layer, verdict.at.call, "forward"):
            linear = layer_evidence(evidence, arm, call)
            for found in _of_linear(linear, verdict, arm, arm):
                yield replace(found, layer=call.module)


def _of_linear(evidence: Evidence, verdict: Verdict, base: str, arm: str) -> Iterator[Budget]:
    """The budgets of the products of a single linear, in units of bound 3.3."""
    for role in ROLES:
        if role != result_of(verdict) and result_of(verdict) in ROLES:
            continue
        before, got = (evidence.traces[name].outputs.get(role) for name in (base, arm))
        if before is None or got is None or evidence.plan.gemms[role].transformed:
            continue
        exact, radius = evidence.reference.layer(role)
        bias = evidence.tensors.get("bias") if role == "output" else None
        low, high = bounds.interval(
            exact, radius, evidence.plan.gemms[role], evidence.spec.dtype, bias=bias
        )
        if bias is not None:
            exact = exact + bias.astype(np.float64)
        steps = list(_steps(evidence, role, base, exact, before.astype(np.float64)))
        if arm != base:
            steps.append((f"what {arm} does differently", _minus(got, before)))
        with np.errstate(invalid="ignore"):
            bound = np.maximum(high - exact, exact - low)
        yield from _at_worst(role, arm, steps, exact, bound)


def _steps(evidence: Evidence, role: Role, arm: str, exact: F64, result: F64) -> Iterator[_Step]:
    """What each step adds to an eager result of a linear, beginning with ``exact``."""
    gemm = evidence.plan.gemms[role]
    planned = exact - evidence.reference.layer(role)[0] + evidence.reference.centre(role)
    if gemm.quantised:
        ideal = exact - evidence.reference.layer(role)[0] + _ideally_scaled(evidence, role)
        yield "quantising the operands, with exact scales", _minus(ideal, exact)
        yield "the recipe's rounding of scales", _minus(planned, ideal)
        a, b = observed(evidence, evidence.traces[arm], role)
        if a is not None and b is not None:
            with np.errstate(all="ignore"):
                multiplied = planned - evidence.reference.centre(role) + reference.product(a, b)
            drawn = "stochastic rounding of the operands"
            yield drawn if gemm.stochastic else _NOT_THE_PLANS, _minus(multiplied, planned)
            planned = multiplied
    yield "adding up the products and rounding the result", _minus(result, planned)


def _ideally_scaled(evidence: Evidence, role: Role) -> F64:
    """The product of the operands, quantised with scales of max / amax in fp32 that are not rounded
    any further."""
    gemm = evidence.plan.gemms[role]
    ideal = replace(gemm, a=_with_exact_scales(gemm.a), b=_with_exact_scales(gemm.b))
    plan: Plan = replace(evidence.plan, gemms={**evidence.plan.gemms, role: ideal})
    return single_reference(plan, evidence.spec.dtype, evidence.tensors).centre(role)


def _with_exact_scales(plan: OperandPlan) -> OperandPlan:
    smallest = float(np.finfo(np.float32).tiny)
    return replace(plan, scale=Fp32Scale(eps=smallest, power_of_two=False))


def _of_model(evidence: Evidence, verdict: Verdict, base: str, arm: str) -> Iterator[Budget]:
    """The budgets of the results of a whole model, which no bound limits: what narrow precision
    makes of each in eager, and what the arm changes."""
    results = exact_results(evidence)
    for name, exact in results.items():
        if name != result_of(verdict) and result_of(verdict) in results:
            continue
        before, got = (evidence.traces[one].outputs.get(name) for one in (base, arm))
        if before is None or got is None or before.shape != exact.shape:
            continue
        steps = [("narrow precision in eager", _minus(before, exact))]
        if arm != base:
            steps.append((f"what {arm} does differently", _minus(got, before)))
        yield from _at_worst(name, arm, steps, exact, None)


def _at_worst(
    role: str, arm: str, steps: list[_Step], exact: F64, bound: F64 | None
) -> Iterator[Budget]:
    """The budget at the element that uses most of its bound; none if no element can be judged, or
    if a result that should be finite is not."""
    with np.errstate(all="ignore"):
        total = np.abs(np.sum([step for _, step in steps], axis=0))
        used = total if bound is None else total / bound
    finite = np.isfinite(used) & np.isfinite(exact)
    if (np.isfinite(exact) & ~np.isfinite(total)).any() or not finite.any():
        return  # an infinite error has no parts
    worst = np.unravel_index(int(np.argmax(np.where(finite, used, -1.0))), used.shape)
    index = tuple(int(i) for i in worst)
    limit = 0.0 if bound is None else float(bound[index])
    sign = 1.0 if sum(step[index] for _, step in steps) >= 0 else -1.0
    yield Budget(
        role=role,
        arm=arm,
        index=index,
        exact=float(exact[index]),
        bound=limit,
        parts=tuple(
            Part(
                words=words,
                share=sign * float(step[index]) / limit if limit else 0.0,
                size=_norm(step, finite) / (_norm(exact, finite) or 1.0),
            )
            for words, step in steps
        ),
    )


def _norm(values: F64, where: NDArray[np.bool_]) -> float:
    return float(np.sqrt(np.sum(np.square(values[where]))))


def _minus(one: NDArray[np.floating], other: NDArray[np.floating]) -> F64:
    with np.errstate(invalid="ignore"):
        return np.asarray(one.astype(np.float64) - other.astype(np.float64))
