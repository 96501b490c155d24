"""One call of a model's linear: its record, the call as a single linear, the first bad call."""

from __future__ import annotations

from dataclasses import replace

from narrowfuzz.case.arm import EAGER, Arm
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.judge.judge import Judge, verdicts_of
from narrowfuzz.numerics.formats import F32
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.layers import layer_spec, layer_tensors
from narrowfuzz.trace.trace import LayerCall
from narrowfuzz.trace.verdict import BAD, Verdict, fingerprint


def call_of(
    judge: Judge, case: Case, module: str, index: int = 0, arm: Arm = EAGER
) -> LayerCall | None:
    """The recorded forward call with this index of a model's linear; None if there is none."""
    trace = judge.observe(case, frozenset({arm.name}), repeat=False).traces.get(arm.name)
    for seen in trace.calls if trace is not None else ():
        if (seen.module, seen.index, seen.phase) == (module, index, "forward"):
            return seen
    return None


def linear_of(
    judge: Judge, case: Case, module: str, index: int = 0, arm: Arm = EAGER
) -> tuple[Spec, dict[str, F32]] | None:
    """The call as a Spec of a single linear, and the tensors that it was given. None if there is no
    such call, or if a linear of that dtype without autocast computes something else."""
    seen = call_of(judge, case, module, index, arm)
    if seen is None or not seen.plain:
        return None
    return layer_spec(case.spec, seen, native=arm.native), layer_tensors(seen)


def first_of(judge: Judge, case: Case, verdict: Verdict) -> Verdict:
    """The same divergence at the first call of its layer that shows it: the judge checks only some
    calls of each layer. Unchanged on compiled and checkpointed arms."""
    at, rule, arm = verdict.at, [BY_NAME[verdict.rule]], verdict.arm
    if not (at.layer and at.call) or ARMS[arm].compiler or ARMS[arm].checkpoint:
        return verdict
    evidence = judge.observe(case, frozenset({arm}), repeat=False)
    eager, name = evidence.traces[arm], fingerprint(verdict, "")
    for call in eager.calls:
        if call.module == at.layer and call.index < at.call:
            seen = replace(evidence, traces={arm: replace(eager, calls=(call,))})
            found = [v for v in verdicts_of(seen, rule) if v.status in BAD]
            same = next((v for v in found if fingerprint(v, "") == name), None)
            if same is not None:
                return same
    return verdict
