"""O25: the results of a call of an operator lie within a proven bound of their float64 reference.

The rule names no operator: the file of each operator (``narrowfuzz/operators``) defines what is a
call of it and what it may return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.numerics.formats import F32
from narrowfuzz.operators import BY_NAME
from narrowfuzz.operators.operator import Expected, Operator
from narrowfuzz.rules.evidence import Evidence, identical
from narrowfuzz.rules.expected import outside, passed
from narrowfuzz.rules.kernels import focused_calls
from narrowfuzz.rules.rule import first, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, Within, bits
from narrowfuzz.trace.trace import OperatorCall, Trace
from narrowfuzz.trace.verdict import Verdict

NAME = "O25"


def check_operators(evidence: Evidence) -> Iterator[Verdict]:
    """O25 for every arm, with a verdict for each operator that is not judged there; with a focus
    only ``focused_calls`` are judged. A call that passed on one arm passes on others if its
    arguments and results have the same bits."""
    right: dict[tuple[str, int], tuple[OperatorCall, list[Verdict]]] = {}
    for arm, trace in evidence.traces.items():
        if not trace.operators:
            yield plain(NAME, arm, "output", "not_applicable", "no call of an operator was seen")
        for what, why in trace.unjudged.items():
            yield plain(NAME, arm, what, "not_applicable", why)
        for call in focused_calls(trace.operators, evidence.focus):
            key = (call.operator, call.index)
            if key in right and _same(right[key][0], call):
                yield from (replace(verdict, arm=arm) for verdict in right[key][1])
                continue
            found = list(judge_call(arm, call, trace, evidence.deviations))
            if all(verdict.status in ("ok", "inconclusive") for verdict in found):
                right[key] = call, found
            yield from found


def _same(one: OperatorCall, other: OperatorCall) -> bool:
    """Are the arguments and the results of both calls the same, to the bit?"""
    if (one.settings, one.device, one.dtypes) != (other.settings, other.device, other.dtypes):
        return False
    return all(
        mine.keys() == theirs.keys() and all(identical(x, theirs[n]) for n, x in mine.items())
        for mine, theirs in ((one.tensors, other.tensors), (one.outputs, other.outputs))
    )


def judge_call(
    arm: str,
    call: OperatorCall,
    trace: Trace | None = None,
    deviations: Mapping[str, str] = {},
) -> Iterator[Verdict]:
    """A verdict on each result of a call. A wrong result is torch's fault, whatever the recipe. It
    is known if one of the deviations (name -> id of the known issue) explains every wrong element.
    """
    operator = BY_NAME[call.operator]
    try:
        expected = operator.expected(call)
    except Unjudged as error:
        yield plain(NAME, arm, call.operator, "inconclusive", str(error))
        return
    as_built: dict[str, Mapping[str, Expected]] = {}
    outside_of = {name: outside(result, call.outputs[name]) for name, result in expected.items()}
    wrong = {name for name, bad in outside_of.items() if bad.any()}
    for name, result in expected.items():
        got = call.outputs[name]
        several = name if len(operator.results) > 1 else ""
        role = operator.role(name)
        if name not in wrong:
            yield passed(NAME, arm, role, result)
            continue
        if before := wrong & {*operator.depends_on.get(name, ())}:
            why = f"it is made of {min(before)}, which is wrong"
            yield plain(NAME, arm, role, "inconclusive", why)
            continue
        at = first(bad := outside_of[name])
        # a sum in a module's backward is identified by the gradient that it computes
        layer = call.module or ("" if trace is None else gives(trace, got))
        wanted = Within(bits(result.lo[at]), bits(result.hi[at]))
        found = Verdict(
            NAME,
            arm,
            role,
            "diverged",
            _symptom(got, result, at),
            At(
                what="operator",
                name=call.operator,
                result=several,
                layer=layer,
                call=call.index,
                phase=call.phase,
                index=at,
            ),
            number(got[at]),
            Is(bits(np.nan)) if np.isnan(result.lo[at]) else wanted,
            factor=_factor(got, result, at),
            remark=f"{several and f'{name} of '}{operator.title(call)} is wrong",
            unconverted=True,
        )
        as_built = as_built or _as_built(operator, call, deviations)
        entry = _known(as_built, name, got, bad)
        yield found.known(entry) if entry else found


def _as_built(
    operator: Operator, call: OperatorCall, deviations: Mapping[str, str]
) -> dict[str, Mapping[str, Expected]]:
    """Known issue -> the results that the call has by its deviation, for each that applies."""
    return {
        deviations[deviation.name]: deviation.expected(call)
        for deviation in operator.deviations
        if deviation.name in deviations and call.device in deviation.devices
    }


def _known(
    as_built: Mapping[str, Mapping[str, Expected]], name: str, got: F32, bad: NDArray[np.bool_]
) -> str:
    """The known issue whose deviation explains every wrong element, "" if none does."""
    for entry, results in as_built.items():
        may = results.get(name)
        if may is not None and not (bad & (outside(may, got) | may.unknown)).any():
            return entry
    return ""


def _symptom(got: F32, expected: Expected, at: tuple[int, ...]) -> str:
    if np.isnan(expected.lo[at]):
        return "NaN missing"
    if np.isnan(got[at]):
        return "NaN from nowhere"
    return "wrong value" if np.isfinite(got[at]) else "not finite"


def _factor(got: F32, expected: Expected, at: tuple[int, ...]) -> float:
    """The error of the result, in units of the tolerance, rounding included."""
    centre, value = float(expected.centre[at]), float(got[at])
    allowed = max(float(expected.hi[at]) - centre, centre - float(expected.lo[at]))
    off = abs(value - centre)
    return off / allowed if np.isfinite(off) and 0.0 < allowed < np.inf else 0.0


def gives(trace: Trace, result: F32) -> str:
    """The module whose parameter has exactly this gradient, "" if there are none or several."""
    names = {
        name.rpartition(".grad")[0].rpartition(".")[0]
        for name, x in trace.outputs.items()
        if name.endswith(".grad") and identical(x.ravel(), result.ravel())
    }
    return names.pop() if len(names) == 1 else ""
