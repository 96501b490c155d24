"""What a change that makes a divergence go away costs: in error, and in time on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from narrowfuzz.case.kind import CONVERTED, kind_of
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import Case
from narrowfuzz.explain.budget import exact_results
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.report.explanation import Cost

#: Data draws whose errors are averaged, and runs of which the fastest counts.
_DRAWS, _RUNS = 5, 5


@dataclass(frozen=True)
class Prices:
    """Compares changed cases with the case that shows a divergence, which runs once for all."""

    judge: Judge
    case: Case
    arm: str
    #: The result whose error is compared.
    result: str

    def of(self, changed: Case, arm: str) -> Cost | None:
        """Error and running time of the changed case on its arm beside those of the case itself.
        None where its results have no float64 counterpart (on ranks, with random numbers), are not
        finite, or are not the same: of another model, or of parameters in another dtype, whose
        rounding a float64 run of the rounded ones does not show."""
        spec = self.case.spec
        same = (changed.spec.model, changed.spec.dtype) == (spec.model, spec.dtype)
        before = self._errors.get(self.result) if same else None
        after = None if before is None else _errors(self.judge, changed, arm).get(self.result)
        if before is None or after is None:
            return None
        return Cost(
            result=self.result,
            error=after,
            error_before=before,
            times=_seconds(self.judge, changed, arm) / self._seconds,
        )

    @cached_property
    def _errors(self) -> dict[str, float]:
        return _errors(self.judge, self.case, self.arm)

    @cached_property
    def _seconds(self) -> float:
        return _seconds(self.judge, self.case, self.arm)


def _errors(judge: Judge, case: Case, arm: str) -> dict[str, float]:
    """The error of each result: the norm of its distance from the float64 run over the norm of that
    run, as the root of the mean square over some draws of data. Without results that are not
    finite."""
    if kind_of(case.spec) not in CONVERTED or case.history:
        return {}
    squares: dict[str, list[float]] = {}
    for i in range(_DRAWS):
        evidence = judge.observe(case.reseeded(i), frozenset({arm}), repeat=False)
        trace = evidence.traces.get(arm)
        if trace is None or trace.error is not None:
            return {}
        for name, exact in exact_results(evidence).items():
            got = trace.outputs.get(name)
            if got is not None and got.shape == exact.shape:
                squares.setdefault(name, []).append(_relative(got, exact) ** 2)
    errors = {name: float(np.sqrt(np.mean(found))) for name, found in squares.items()}
    return {name: error for name, error in errors.items() if np.isfinite(error)}


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
