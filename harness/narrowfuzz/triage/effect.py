"""The size of a divergence in outputs and gradients, from which its severity is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.kind import LAYERS, LINEAR, MODEL, ON_RANKS, Kind, kind_of
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import base_of
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.severity import LARGE, SMALL
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.numerics.reference import Undivided, product
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import NATIVE, Evidence
from narrowfuzz.rules.layers import layer_evidences
from narrowfuzz.rules.own_functions import DERIVATIVES
from narrowfuzz.rules.sharded.evidence import groups, joined, run_of
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.finding import Came

#: Change that a conversion made (symptom of rule ``census``) -> its effect on a training step. Any
#: change that is not listed alters the step's results: LARGE.
_OF_CENSUS = {
    "hooks lost": SMALL,
    "parameter hooks lost": SMALL,
    "attributes lost": SMALL,
    "attributes changed": SMALL,
    "parameter attributes lost": SMALL,
    "parameter device changed": SMALL,
    "state_dict keys changed": SMALL,
    "module type changed": 0.0,
    "shared module split": 0.0,
    "training flag changed": 0.0,
    "parameter type changed": 0.0,
    "parameter order changed": 0.0,
}


def observed(judge: Judge, case: Case, verdict: Verdict) -> Evidence:
    """The evidence of the guilty arm's run and of the runs that it is compared with."""
    rungs = frozenset({base_of(case.spec).name, EAGER.name, verdict.arm})
    # a divergence by chance shows only in a second run; that of a compiled arm would cost too much
    again = verdict.rule == "O1" and not ARMS[verdict.arm].compiled
    return judge.observe(case, rungs, repeat=again)


@dataclass(frozen=True)
class Effect:
    """The excess error of a result as a share of its norm, and what came out in place of numbers
    where a share cannot express it."""

    share: float = 0.0
    came: Came = ""


#: The effect where there was nothing to measure.
_UNKNOWN = Effect(SMALL)


def effect_of(evidence: Evidence, verdict: Verdict) -> float:
    """The excess error of the worst output or gradient of this case."""
    return worst_of(evidence, verdict).share


def worst_of(evidence: Evidence, verdict: Verdict) -> Effect:
    """The excess error of the worst output or gradient of this case, as a share of its norm.

    It is how much further the guilty arm is from the unquantised result than the run that it is
    compared with: the executed plan for a single linear or a layer of a model; the eager run for a
    whole model (and for a model with a layer whose recompute differs); the run without recompute
    for a library's own layers. Where none of these can be measured, as for a state that no product
    has used yet, it is SMALL, which neither plays the divergence down nor exaggerates it.
    """
    if verdict.rule == "census":
        return Effect(_OF_CENSUS.get(verdict.symptom, LARGE))
    if verdict.at.what == "function":
        found = evidence.datum(DERIVATIVES) or ()
        return Effect(max((d.off for d in found if d.wrong), default=SMALL))
    if verdict.at.what == "operator":
        return _of_operator(evidence, verdict)
    return _EFFECTS[kind_of(evidence.spec)](evidence, verdict)


def _of_model(evidence: Evidence, verdict: Verdict) -> Effect:
    """The effect on the layer that the verdict is about, or on the whole run if the layer's calls
    were not observed."""
    layers = (seen for at, seen in layer_evidences(evidence) if at.layer == verdict.at.layer)
    arm = NATIVE if evidence.native(verdict.arm) else EAGER.name
    own = next((seen for seen in layers if arm in seen.traces), None)
    if own is None:
        return _of_whole(evidence, verdict.arm)
    return _worst((_of_linear(own, arm), _of_recompute(evidence, verdict.arm)))


def _of_ranks(evidence: Evidence, verdict: Verdict) -> Effect:
    """The effect on the results of ranks, compared with the same rows in one process: on outputs
    and input gradients, and in a pipeline or context layout on every result."""
    if run_of(evidence) is None:
        return _UNKNOWN
    found = [Effect()]
    for _, single, group in groups(evidence):
        for name, want in single.outputs.items():
            pieces = [trace.outputs[name] for trace in group if name in trace.outputs]
            if pieces and (name_of(name).by_rows or layout_of(evidence.spec).single_group):
                got = joined(pieces, want.shape, evidence.spec.batch)
                found.append(Effect(1.0) if got is None else _excess_of(got, want, want))
    return _told(_worst(found))


def _of_operator(evidence: Evidence, verdict: Verdict) -> Effect:
    """The effect on an operator's results: their distance from the nearest values allowed."""
    trace = evidence.traces.get(verdict.arm)
    found = [Effect()]
    for call in trace.operators if trace is not None else ():
        if call.operator == verdict.at.name:
            for name, may in OPERATORS[call.operator].expected(call).items():
                got = call.outputs[name]
                nearest = np.clip(np.nan_to_num(got), may.lo, may.hi)
                found.append(_excess_of(got, nearest, may.centre, may.unknown))
    return _told(_worst(found))


def _of_linear(evidence: Evidence, arm: str) -> Effect:
    trace = evidence.traces.get(arm)
    if trace is None or trace.error is not None:
        return _UNKNOWN
    try:
        expected, truth = _by_plan(evidence)
    except Undivided:  # the library ran a shape that the plan's blocks do not divide
        return _UNKNOWN
    return excess(trace.outputs, expected, truth, _may_overflow(evidence, expected))


def _may_overflow(evidence: Evidence, results: Iterable[str]) -> dict[str, Any]:
    """For each result, the elements whose sum may overflow on the way, whatever else is wrong.
    There a NaN or an infinity is as good as a number, because the order of the additions decides
    which of them comes out."""
    return {str(role): evidence.reference.may_overflow(role) for role in ROLES if role in results}


def _by_plan(evidence: Evidence) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each result as the plan computes it, and each result without quantisation."""
    expected, truth = {}, {}
    for role in ROLES:
        name = str(role)
        if not evidence.backward_of(role):
            continue
        a, b = (evidence.reference.operand(role, side).x.astype(np.float64) for side in "ab")
        x, y = (evidence.reference.values(role, side) for side in "ab")
        bias = evidence.tensors.get("bias") if role == "output" else None
        added = 0.0 if bias is None else bias.reshape(1, -1).astype(np.float64)
        expected[name], truth[name] = product(x, y) + added, product(a, b) + added
    return expected, truth


def _of_recompute(evidence: Evidence, arm: str) -> Effect:
    """The effect, against eager, of an arm that only recomputes: a layer whose recompute differs
    may be right by itself while the gradients of all layers before it are wrong."""
    runs = None if evidence.compared(arm) else _both(evidence, arm)
    return excess(runs[1], runs[0], runs[0]) if runs else Effect()


def _of_whole(evidence: Evidence, arm: str) -> Effect:
    runs = _both(evidence, arm)
    if not runs:
        return _UNKNOWN
    eager, guilty = runs
    truth: Mapping[str, Any] = eager
    if evidence.twin is not None and evidence.exact:
        truth = evidence.exact
    return _told(excess(guilty, eager, truth))


def _both(evidence: Evidence, arm: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The results of the eager run and of this arm's run. None unless both runs have results: for
    a library's layers on ranks, each rank has results of its own."""
    eager, guilty = evidence.traces.get(evidence.base), evidence.traces.get(arm)
    if eager is None or guilty is None or eager.error or guilty.error or not guilty.outputs:
        return None
    return eager.outputs, guilty.outputs


_EFFECTS: Mapping[Kind, Callable[[Evidence, Verdict], Effect]] = {
    LINEAR: lambda evidence, verdict: _of_linear(evidence, verdict.arm),
    MODEL: _of_model,
    LAYERS: lambda evidence, verdict: _of_whole(evidence, verdict.arm),
    **dict.fromkeys(ON_RANKS, _of_ranks),
}


def _told(effect: Effect) -> Effect:
    """The effect, or _UNKNOWN if it is zero, which means that none could be measured."""
    return effect if effect.share else _UNKNOWN


def _worst(effects: Iterable[Effect]) -> Effect:
    return max(effects, key=lambda effect: effect.share)


def excess(
    got: Mapping[str, Any],
    expected: Mapping[str, Any],
    truth: Mapping[str, Any],
    overflows: Mapping[str, Any] = MappingProxyType({}),
) -> Effect:
    """The largest excess error of any result; that of a missing result is 1. ``overflows`` maps a
    result to a mask of the elements that need not be numbers."""
    found = [Effect()]
    for name in truth.keys() & expected.keys():
        if name not in got:
            found.append(Effect(1.0, "nothing"))
        elif got[name].shape == expected[name].shape:
            open_ = overflows.get(name, False)
            found.append(_excess_of(got[name], expected[name], truth[name], open_))
    return _worst(found)


def _excess_of(got: Any, expected: Any, truth: Any, overflows: Any = False) -> Effect:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        got, expected, truth = (np.asarray(x, dtype=np.float64) for x in (got, expected, truth))
    compared = np.isfinite(expected) & np.isfinite(truth)
    finite = np.isfinite(got)
    if (lost := compared & ~finite & ~np.asarray(overflows)).any():
        return Effect(math.inf, "NaN" if np.isnan(got[lost]).any() else "infinity")
    if (np.isnan(expected) & np.isnan(truth) & finite & ~np.asarray(overflows)).any():
        return Effect(math.inf, "a number")
    if (compared & ~finite).any() and not (compared & finite).any():
        return _UNKNOWN  # every element may have overflowed
    compared &= finite
    with np.errstate(over="ignore"):
        size = float(np.linalg.norm(truth[compared]))
        far, base = (float(np.linalg.norm(x[compared] - truth[compared])) for x in (got, expected))
    if size == 0.0:
        return Effect(math.inf, "not zero") if got[compared].any() else Effect()
    return Effect(max(0.0, far - base) / size)
