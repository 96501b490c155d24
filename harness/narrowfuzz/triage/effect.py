"""How large a divergence is on outputs and gradients: what a severity weighs."""

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

#: Changes by a conversion, by what they do to a step of training; all others change its results.
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
    """The guilty arm's run, and those that it is held against."""
    rungs = frozenset({base_of(case.spec).name, EAGER.name, verdict.arm})
    # what strikes by chance is seen in a second run; a compiled one would cost too much
    again = verdict.rule == "O1" and not ARMS[verdict.arm].compiled
    return judge.observe(case, rungs, repeat=again)


@dataclass(frozen=True)
class Effect:
    """The excess error of a result, a share of its norm, and what came where no share says it."""

    share: float = 0.0
    came: Came = ""


#: Nothing was there to measure.
_UNKNOWN = Effect(SMALL)


def effect_of(evidence: Evidence, verdict: Verdict) -> float:
    """The excess error of the worst output or gradient of this case."""
    return worst_of(evidence, verdict).share


def worst_of(evidence: Evidence, verdict: Verdict) -> Effect:
    """The excess error of the worst output or gradient of this case, a share of its norm.

    How much further from the unquantised result the guilty arm is than what it is held against:
    the plan executed on a single linear or a model's layer, the eager run of a whole model (and of
    one with a layer that is recomputed otherwise), the plain run of a library's checkpointed
    layers. Where nothing of that is there to measure, as for a state that no product has met yet,
    SMALL: neither played down nor up.
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
    """Of the layer that the verdict is about, else of the whole run."""
    layers = (seen for at, seen in layer_evidences(evidence) if at.layer == verdict.at.layer)
    arm = NATIVE if evidence.native(verdict.arm) else EAGER.name
    own = next((seen for seen in layers if arm in seen.traces), None)
    if own is None:
        return _of_whole(evidence, verdict.arm)
    return _worst((_of_linear(own, arm), _of_recompute(evidence, verdict.arm)))


def _of_ranks(evidence: Evidence, verdict: Verdict) -> Effect:
    """Of what ranks return and send back, against their pieces of the rows in one process; of a
    pipeline or a context, of all that its ranks have."""
    if run_of(evidence) is None:
        return _UNKNOWN
    found = [Effect()]
    for _, alone, group in groups(evidence):
        for name, want in alone.outputs.items():
            pieces = [trace.outputs[name] for trace in group if name in trace.outputs]
            if pieces and (name_of(name).by_rows or layout_of(evidence.spec).together):
                got = joined(pieces, want.shape, evidence.spec.batch)
                found.append(Effect(1.0) if got is None else _excess_of(got, want, want))
    return _told(_worst(found))


def _of_operator(evidence: Evidence, verdict: Verdict) -> Effect:
    """Of the calls of an operator, against the nearest that they may return."""
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
    except Undivided:  # it ran although its plan has no blocks for it
        return _UNKNOWN
    return excess(trace.outputs, expected, truth, _may_overflow(evidence, expected))


def _may_overflow(evidence: Evidence, results: Iterable[str]) -> dict[str, Any]:
    """Where a sum may leave the range on its way, whatever else is wrong: a NaN or an infinity is
    as good as a number there, as which of them comes is a matter of the order."""
    return {str(role): evidence.reference.may_overflow(role) for role in ROLES if role in results}


def _by_plan(evidence: Evidence) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each result as the plan has it, and unquantised."""
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
    """Of a run that does eager's work again in backward and nothing else, against eager's: a layer
    whose recomputation differs may be right in itself, and each gradient before it wrong."""
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
    """The results of the eager run and of this arm's; None unless both have any: of a library's
    layers on ranks each rank has its own."""
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
    """The effect, or that none could be measured."""
    return effect if effect.share else _UNKNOWN


def _worst(effects: Iterable[Effect]) -> Effect:
    return max(effects, key=lambda effect: effect.share)


def excess(
    got: Mapping[str, Any],
    expected: Mapping[str, Any],
    truth: Mapping[str, Any],
    overflows: Mapping[str, Any] = MappingProxyType({}),
) -> Effect:
    """The largest excess error of any result; a result that is missing is off by all of it.
    ``overflows``: of a result, the elements that need not be numbers."""
    found = [Effect()]
    for name in truth.keys() & expected.keys():
        if name not in got:
            found.append(Effect(1.0, "nothing"))
        elif got[name].shape == expected[name].shape:
            open_ = overflows.get(name, False)
            found.append(_excess_of(got[name], expected[name], truth[name], open_))
    return _worst(found)


def _excess_of(got: Any, expected: Any, truth: Any, overflows: Any = False) -> Effect:
    got, expected, truth = (np.asarray(x, dtype=np.float64) for x in (got, expected, truth))
    compared = np.isfinite(expected) & np.isfinite(truth)
    came = np.isfinite(got)
    if (lost := compared & ~came & ~np.asarray(overflows)).any():
        return Effect(math.inf, "NaN" if np.isnan(got[lost]).any() else "infinity")
    if (np.isnan(expected) & np.isnan(truth) & came & ~np.asarray(overflows)).any():
        return Effect(math.inf, "a number")
    if (compared & ~came).any() and not (compared & came).any():
        return _UNKNOWN  # each may have left the range
    compared &= came
    with np.errstate(over="ignore"):
        size = float(np.linalg.norm(truth[compared]))
        far, base = (float(np.linalg.norm(x[compared] - truth[compared])) for x in (got, expected))
    if size == 0.0:
        return Effect(math.inf, "not zero") if got[compared].any() else Effect()
    return Effect(max(0.0, far - base) / size)
