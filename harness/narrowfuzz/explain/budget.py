"""The error budget of a wrong result: how much of its distance from the exact result each step of
the computation adds, from quantising the operands to what the finding's arm does differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.case.kind import CONVERTED, LINEAR, kind_of
from narrowfuzz.case.ladder import base_of
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import F64, FP32
from narrowfuzz.numerics.plan import ROLES, OperandPlan, Role
from narrowfuzz.numerics.reference import Undivided
from narrowfuzz.numerics.scales import Fp32Scale
from narrowfuzz.operators.linear import single_reference
from narrowfuzz.report.explanation import Budget, Part
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.gemm import interval, observed
from narrowfuzz.rules.layers import layer_evidence
from narrowfuzz.trace.verdict import Verdict

#: A part of the error, in words, and the difference that it makes to every element.
_Step = tuple[str, F64]


@dataclass(frozen=True)
class _Found:
    """A budget, and by how much its error is the one to show."""

    score: float
    budget: Budget


def budget(judge: Judge, case: Case, verdict: Verdict, arm: str) -> Budget | None:
    """The budget of the result of this case on ``arm`` that ``verdict`` is about; after a recompute
    went wrong, of the result that the arm changes most. None where nothing can be compared with an
    exact result: cases on ranks or with a history, a library's own layers, random numbers, verdicts
    about something else than a linear's or a model's result, results that are not finite."""
    if kind_of(case.spec) not in CONVERTED or case.history:
        return None
    base = base_of(case.spec).name
    evidence = judge.observe(case, frozenset({base, arm}), repeat=False)
    traces = evidence.traces
    if any(name not in traces or traces[name].error is not None for name in (base, arm)):
        return None
    try:
        if kind_of(case.spec) is LINEAR:
            found = [*_of_linear(evidence, verdict, base, arm)]
        elif verdict.at.layer:
            found = [*_of_call(evidence, verdict, arm)]
        else:
            found = [*_of_model(evidence, verdict, base, arm)]
    except Undivided:  # the plan does not define what ran all the same
        return None
    if verdict.at.phase == "recompute":
        found = [replace(one, score=one.budget.parts[-1].size) for one in found]
    return max(found, key=lambda one: one.score).budget if found else None


def result_of(verdict: Verdict) -> str:
    """The name of the result that a verdict is about, be it by an operand of its product."""
    return verdict.at.name or verdict.role


def _is_about(verdict: Verdict, result: str) -> bool:
    """May this result be wrong by what the verdict is about? A recompute may spoil any."""
    return verdict.at.phase == "recompute" or result == result_of(verdict)


def exact_results(evidence: Evidence) -> dict[str, F64]:
    """The results of a case without rounding, by name: those of a linear from its tensors, those of
    a model from a float64 run. Empty if there are none, as with random numbers."""
    if kind_of(evidence.spec) is not LINEAR:
        return {} if evidence.twin is None else evidence.exact
    found: dict[str, F64] = {}
    for role in ROLES:
        if role != "output" and "grad_output" not in evidence.tensors:
            continue  # of a call without a backward
        a, b = reference.canonical_operands(role, evidence.tensors)
        found[role] = reference.product(a.astype(np.float64), b.astype(np.float64))
    if (bias := evidence.tensors.get("bias")) is not None:
        found["output"] = found["output"] + bias.astype(np.float64)
    return found


def _of_call(evidence: Evidence, verdict: Verdict, arm: str) -> Iterator[_Found]:
    """The budgets of the products of the call that the verdict is about; none on arms whose calls
    are not observed one by one."""
    for call in evidence.traces[arm].calls if arm in evidence.plain else ():
        if (call.module, call.index, call.phase) == (verdict.at.layer, verdict.at.call, "forward"):
            for one in _of_linear(layer_evidence(evidence, arm, call), verdict, arm, arm):
                yield replace(one, budget=replace(one.budget, layer=call.module))


def _of_linear(evidence: Evidence, verdict: Verdict, base: str, arm: str) -> Iterator[_Found]:
    """The budgets of the products of a single linear, with bound 3.3 of docs/rules.md."""
    exact_of = exact_results(evidence)
    for role in ROLES:
        before, got = (evidence.traces[name].outputs.get(role) for name in (base, arm))
        if before is None or got is None or evidence.plan.gemms[role].transformed:
            continue
        if not _is_about(verdict, role):
            continue
        exact = exact_of[role]
        steps = list(_steps(evidence, role, base, exact, before.astype(np.float64)))
        if arm != base:
            steps.append((f"what {arm} does differently", _minus(got, before)))
        bias = evidence.tensors.get("bias") if role == "output" else None
        low, high = interval(evidence, arm, role, *evidence.reference.layer(role), bias)
        with np.errstate(invalid="ignore"):
            bound = np.maximum(high - exact, exact - low)
        yield from _at_worst(role, arm, steps, exact, bound)


def _steps(evidence: Evidence, role: Role, arm: str, exact: F64, result: F64) -> Iterator[_Step]:
    """What each step adds to an eager result of a linear, beginning with ``exact``. Quantising
    includes the rounding of dequantised operands to the layer's dtype, where the recipe has one."""
    gemm = evidence.plan.gemms[role]
    planned, last = exact, "adding up the products and rounding the result"
    if gemm.quantised:
        bias = exact - evidence.reference.layer(role)[0]
        ideal = bias + _ideally_scaled(evidence, role)
        planned = bias + evidence.reference.centre(role)
        yield "quantising the operands, with exact scales", _minus(ideal, exact)
        yield "the recipe's scales in place of exact ones", _minus(planned, ideal)
        a, b = observed(evidence, evidence.traces[arm], role)
        if a is None or b is None:
            last = f"operands that were not observed, {last}"
        else:
            with np.errstate(all="ignore"):
                multiplied = bias + reference.product(a, b)
            words = "operands that differ from the recipe's"
            yield (
                f"stochastic rounding, or {words}" if gemm.stochastic else words,
                _minus(multiplied, planned),
            )
            planned = multiplied
    yield last, _minus(result, planned)


def _ideally_scaled(evidence: Evidence, role: Role) -> F64:
    """The product of the operands, quantised with scales of max / amax in fp32 that are not rounded
    any further."""
    gemm = evidence.plan.gemms[role]
    ideal = replace(gemm, a=_with_exact_scales(gemm.a), b=_with_exact_scales(gemm.b))
    plan = replace(evidence.plan, gemms={**evidence.plan.gemms, role: ideal})
    return single_reference(plan, evidence.spec.dtype, evidence.tensors).centre(role)


def _with_exact_scales(plan: OperandPlan) -> OperandPlan:
    assert plan.format is not None
    # of granules of zeros the scale is finite
    smallest = plan.format.max / FP32.max * (1 + 2.0**-20)
    return replace(plan, scale=Fp32Scale(eps=smallest, power_of_two=False))


def _of_model(evidence: Evidence, verdict: Verdict, base: str, arm: str) -> Iterator[_Found]:
    """The budgets of the results of a whole model, whose error no bound limits: that of the eager
    run, and what the arm changes."""
    for name, exact in exact_results(evidence).items():
        before, got = (evidence.traces[one].outputs.get(name) for one in (base, arm))
        if not _is_about(verdict, name) or before is None or got is None:
            continue
        if before.shape == exact.shape:
            steps = [("eager, against the float64 run", _minus(before, exact))]
            if arm != base:
                steps.append((f"what {arm} does differently", _minus(got, before)))
            yield from _at_worst(name, arm, steps, exact, None)


def _at_worst(
    name: str, arm: str, steps: list[_Step], exact: F64, bound: F64 | None
) -> Iterator[_Found]:
    """The budget at the element that uses most of its bound, or has the largest error if there is
    none; nothing if a result is not finite although it should be."""
    if not exact.size:
        return
    with np.errstate(all="ignore"):
        total = np.abs(np.sum([step for _, step in steps], axis=0))
        used = total if bound is None else np.where(total > 0, total / bound, 0.0)
    known = np.isfinite(exact) & (True if bound is None else np.isfinite(bound))
    if not known.any() or any(not np.isfinite(step[known]).all() for _, step in steps):
        return
    worst = np.unravel_index(int(np.argmax(np.where(known, used, -1.0))), used.shape)
    index = tuple(int(i) for i in worst)
    size = _norm(exact, known) or 1.0
    found = Budget(
        result=name,
        arm=arm,
        index=index,
        exact=float(exact[index]),
        bound=None if bound is None else float(bound[index]),
        parts=tuple(
            Part(words=words, added=float(step[index]), size=_norm(step, known) / size)
            for words, step in steps
        ),
    )
    score = float(used[index]) if bound is not None else _norm(total, known) / size
    yield _Found(score, found)


def _norm(values: F64, where: NDArray[np.bool_]) -> float:
    return float(np.sqrt(np.sum(np.square(values[where]))))


def _minus(one: NDArray[np.floating], other: NDArray[np.floating]) -> F64:
    with np.errstate(invalid="ignore"):
        return np.asarray(one.astype(np.float64) - other.astype(np.float64))
