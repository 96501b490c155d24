"""What a change that makes a divergence go away costs: in error, and in time on this machine."""

from __future__ import annotations

import time

import msgspec
import numpy as np

from narrowfuzz.case.kind import CONVERTED, kind_of
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import Case
from narrowfuzz.explain.budget import exact_results
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.report.causes import Cost

#: Data draws whose errors are averaged, and runs of which the fastest counts.
_DRAWS, _RUNS = 5, 5


def cost(
    judge: Judge, own: Case, own_arm: str, changed: Case, arm: str, result: str
) -> Cost | None:
    """Error and running time of the changed case on its arm beside those of the case itself. The
    error is that of ``result`` where both cases have it, or else of their worst results. None where
    there is no float64 run to compare with: on ranks, with random numbers."""
    if not {kind_of(own.spec), kind_of(changed.spec)} <= {*CONVERTED}:
        return None
    before, after = _errors(judge, own, own_arm), _errors(judge, changed, arm)
    if not before or not after:
        return None
    name = result if result in before and result in after else ""
    times = _seconds(judge, changed, arm) / _seconds(judge, own, own_arm)
    return Cost(
        result=name,
        error=after[name] if name else max(after.values()),
        error_before=before[name] if name else max(before.values()),
        times=times,
    )


def _errors(judge: Judge, case: Case, arm: str) -> dict[str, float]:
    """The error of each result: the norm of its distance from the float64 run over the norm of that
    run, as the root of the mean square over some draws of data. Empty where there is none."""
    squares: dict[str, list[float]] = {}
    for i in range(_DRAWS):
        data = msgspec.structs.replace(case.data, seed=(case.data.seed + i) % 2**32)
        one = msgspec.structs.replace(case, data=data)
        evidence = judge.observe(one, frozenset({arm}), repeat=False)
        trace = evidence.traces.get(arm)
        if trace is None or trace.error is not None:
            return {}
        for name, exact in exact_results(evidence).items():
            got = trace.outputs.get(name)
            if got is not None and got.shape == exact.shape:
                squares.setdefault(name, []).append(_relative(got, exact) ** 2)
    return {name: float(np.sqrt(np.mean(found))) for name, found in squares.items()}


def _relative(got: F32, exact: F64) -> float:
    with np.errstate(all="ignore"):
        size = float(np.linalg.norm(exact))
        return float(np.linalg.norm(got.astype(np.float64) - exact)) / (size or 1.0)


def _seconds(judge: Judge, case: Case, arm: str) -> float:
    """The fastest of some runs that nobody observes, after one that compiles."""
    tensors = tensors_of(case, judge.recipe(case.spec))
    program = judge.programs.of(case.spec, ARMS[arm])
    found = []
    for _ in range(_RUNS + 1):
        started = time.perf_counter()
        program.run(tensors, tap=False, spec=case.spec)
        found.append(time.perf_counter() - started)
    return min(found[1:])
