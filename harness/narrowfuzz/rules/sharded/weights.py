"""S16: on ranks, linears use the parameters that the last step of the optimizer left there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from narrowfuzz.case.events import Forward, Step
from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import Spec
from narrowfuzz.rules.evidence import Evidence, same_bits
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.rules.sharded.evidence import (
    arm_of,
    before_steps,
    by_part,
    origin,
    run_of,
    stacked,
)
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Same
from narrowfuzz.trace.trace import LayerCall
from narrowfuzz.trace.verdict import Verdict

NAME = "S16"
NOT_THE_PARAMETER = "is not the parameter of the last step"
_TENSORS = ("weight", "bias")


def check_weights_after_steps(evidence: Evidence) -> Iterator[Verdict]:
    """S16: what a linear multiplies and adds after a step has the bits of the parameters that the
    ranks hold after it."""
    arm, run, spec = arm_of(evidence), run_of(evidence), evidence.spec
    if run is None:
        return
    if not (spec.optimizes and layout_of(spec).follows_steps):
        why = "no parameters are recorded after a step"
        yield plain(NAME, arm, "operand", "not_applicable", why)
        return
    steps, seen = _steps_before_forwards(spec), False
    for rank, trace in enumerate(run.ranks):
        for call in trace.calls:
            for tensor in _TENSORS if steps[call.forward] else ():
                verdict = _same_parameter(evidence, rank, call, tensor, steps[call.forward])
                if verdict is not None:
                    seen = True
                    yield verdict
    if not seen:
        why = "no linear ran after a step with values of its parameters"
        yield plain(NAME, arm, "operand", "not_applicable", why)


def _steps_before_forwards(spec: Spec) -> list[int]:
    """The number of steps before each forward of a training."""
    events = spec.training
    before = accumulate((isinstance(event, Step) for event in events), initial=0)
    return [n for event, n in zip(events, before, strict=False) if isinstance(event, Forward)]


def _same_parameter(
    evidence: Evidence, rank: int, call: LayerCall, tensor: str, steps: int
) -> Verdict | None:
    """Compares a tensor that a rank's linear was given with the ranks' pieces of the parameter
    after this many steps. None if either was not recorded, as codes of it were gathered, or if
    ranks hold it in another way."""
    run, parameter = run_of(evidence), f"{call.module}.{tensor}"
    assert run is not None
    names = [*before_steps(run.ranks[0], parameter, steps)]
    held = call.tensors.get(tensor)
    if held is None or len(names) < steps:
        return None
    name = names[-1]
    if any(name not in trace.outputs for trace in run.ranks):
        return None
    parts = by_part(evidence, name)
    pieces = parts[rank % len(parts)]
    want = stacked(evidence, pieces)
    if want.shape != held.shape:
        return None
    bad = ~same_bits(held, want)
    if not bad.any():
        return plain(NAME, arm_of(evidence), "operand", "ok")
    index = first(bad)
    holder, inside = origin([*pieces.values()], want.shape, index)
    at = At(
        what="source",
        name=tensor,
        index=index,
        layer=call.module,
        call=call.index,
        phase="recompute" if call.phase == "recompute" else "forward",
        rank=rank,
    )
    there = Same(At(name=name, index=inside, rank=[*pieces][holder]), number(want[index]))
    got = number(held[index])
    return diverged(NAME, arm_of(evidence), "operand", NOT_THE_PARAMETER, at, got, there)
