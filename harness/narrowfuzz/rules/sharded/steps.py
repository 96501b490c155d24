"""S15: on ranks a step of an optimizer is the one that its definition gives for the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import OPTIMIZERS, Spec
from narrowfuzz.numerics.formats import F32, F64, FORMATS
from narrowfuzz.operators.optimizer_steps import STATELESS, step_without_state
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.clipping import scale_of, unscaled
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.expected import outside, passed
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.rules.sharded.evidence import (
    arm_of,
    before_steps,
    by_part,
    origin,
    part_of,
    run_of,
    stacked,
)
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import between
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

NAME = "S15"
NOT_THE_STEP = "is not the optimizer's step"


def check_steps_on_ranks(evidence: Evidence) -> Iterator[Verdict]:
    """S15: each rank's piece of a parameter moves by the step for its piece of the gradient."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    if why := _not_judged(evidence.spec) or _skipped(evidence, run.ranks):
        yield plain(NAME, arm, "parameter", "not_applicable", why)
        return
    given = {name_of(name).gradient_of for name in run.ranks[0].outputs} & evidence.tensors.keys()
    for parameter in sorted(given):
        yield from _moved(evidence, run, parameter)


def _not_judged(spec: Spec) -> str:
    """Why steps of this Spec are not judged; "" if they are."""
    if not (spec.optimizes and layout_of(spec).follows_steps):
        return "no parameters are recorded after a step"
    if OPTIMIZERS[spec.optimizer][0] not in STATELESS or spec.optimizer.endswith("_rounded"):
        return f"no reference for a step of {spec.optimizer}"
    return ""


def _skipped(evidence: Evidence, ranks: Sequence[Trace]) -> str:
    """Why a scaled step is not taken; "" if it is."""
    if evidence.spec.loss_scaling == "none":
        return ""
    every = (t for trace in ranks for name, t in trace.outputs.items() if name_of(name).gradient_of)
    return "" if all(np.isfinite(t).all() for t in every) else "an infinity skips the step"


def _moved(evidence: Evidence, run: Trace, parameter: str) -> Iterator[Verdict]:
    """Judges the steps of one parameter; if the optimizer has moments, only the first step, before
    which there are none."""
    spec, arm, one = evidence.spec, arm_of(evidence), run.ranks[0]
    name, options = OPTIMIZERS[spec.optimizer]
    count = spec.steps if name == "SGD" and "momentum" not in options else 1
    is_clipped, before = spec.clipping != "none", ""
    kind = f"{parameter}.{'clipped' if is_clipped else 'grad'}"
    steps = [
        *zip(before_steps(one, kind, count), before_steps(one, parameter, count), strict=False)
    ]
    if not steps:
        yield plain(NAME, arm, "parameter", "not_applicable", "no gradient")
    for step, (gradient, after) in enumerate(steps):
        if any(not {gradient, after} <= trace.outputs.keys() for trace in run.ranks):
            yield plain(NAME, arm, "parameter", "not_applicable", "a rank has no gradient")
            return
        scale = 1.0 if is_clipped else scale_of(evidence, one, step)
        yield from _one_step(evidence, parameter, before, gradient, after, scale)
        before = after


def _one_step(
    evidence: Evidence, parameter: str, before: str, gradient: str, after: str, scale: float
) -> Iterator[Verdict]:
    """Judges one step by the names of its results; ``before`` "": the parameter of the case."""
    spec, arm, fmt = evidence.spec, arm_of(evidence), FORMATS[evidence.spec.dtype]
    moved = by_part(evidence, after)
    for part, pieces in enumerate(moved):
        got, grad = stacked(evidence, pieces), stacked(evidence, by_part(evidence, gradient)[part])
        if before:
            start = stacked(evidence, by_part(evidence, before)[part])
        else:
            start = part_of(evidence.tensors[parameter], got.shape, part, len(moved))
        if start is None or grad.shape != got.shape:
            yield plain(NAME, arm, "parameter", "inconclusive", "pieces make up no whole")
            continue
        x, radius = unscaled(grad, scale, fmt)
        may = step_without_state(
            *OPTIMIZERS[spec.optimizer], spec.dtype, start, x.astype(np.float32)
        )
        bad = outside(may, got) & (radius == 0.0)
        if bad.any():
            yield _wrong(arm, after, pieces, got, first(bad), (may.lo, may.hi))
        else:
            yield passed(NAME, arm, "parameter", may)


def _wrong(
    arm: str,
    name: str,
    pieces: dict[int, F32],
    got: F32,
    at: tuple[int, ...],
    ends: tuple[F64, F64],
) -> Verdict:
    """The divergence of this element, on the rank that holds it."""
    piece, inside = origin([*pieces.values()], got.shape, at)
    place = At(name=name, index=inside, rank=[*pieces][piece])
    expect = between(ends[0][at], ends[1][at])
    return diverged(NAME, arm, "parameter", NOT_THE_STEP, place, number(got[at]), expect)
