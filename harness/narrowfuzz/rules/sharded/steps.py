"""S15: on ranks the first step of an optimizer is what its definition makes of the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from narrowfuzz.case.layout import layout_of
from narrowfuzz.case.spec import OPTIMIZERS, Spec
from narrowfuzz.numerics.formats import F32, F64, FORMATS
from narrowfuzz.operators.optimizer_steps import FIRST_STEPS, first_step
from narrowfuzz.play.job import FIRST_SCALE
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.clipping import unscaled
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


def check_first_step(evidence: Evidence) -> Iterator[Verdict]:
    """S15: each rank's piece of a parameter moves as its piece of the gradient says."""
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
    """Why nothing is known of its steps; "" if something is."""
    if not (spec.optimizes and layout_of(spec).follows_steps):
        return "no parameters are recorded after a step"
    if OPTIMIZERS[spec.optimizer][0] not in FIRST_STEPS or spec.optimizer.endswith("_rounded"):
        return f"no reference for a first step of {spec.optimizer}"
    return ""


def _skipped(evidence: Evidence, ranks: Sequence[Trace]) -> str:
    """Why a scaled step is not taken; "" if it is."""
    if evidence.spec.loss_scaling == "none":
        return ""
    every = (t for trace in ranks for name, t in trace.outputs.items() if name_of(name).gradient_of)
    return "" if all(np.isfinite(t).all() for t in every) else "an infinity skips the step"


def _moved(evidence: Evidence, run: Trace, parameter: str) -> Iterator[Verdict]:
    arm, spec, parts = arm_of(evidence), evidence.spec, max(evidence.spec.sharding.tensor, 1)
    is_clipped, fmt = spec.clipping != "none", FORMATS[spec.dtype]
    kind = f"{parameter}.{'clipped' if is_clipped else 'grad'}"
    keys = {*before_steps(run.ranks[0], kind, 1), *before_steps(run.ranks[0], parameter, 1)}
    if len(keys) < 2 or any(keys - trace.outputs.keys() for trace in run.ranks):
        yield plain(NAME, arm, "parameter", "not_applicable", "no gradient")
        return
    of_gradient, after = sorted(keys, key=lambda name: name_of(name).kind != kind)
    scale = FIRST_SCALE if spec.loss_scaling != "none" and not is_clipped else 1.0
    for part, (grads, pieces) in enumerate(
        zip(by_part(evidence, of_gradient), by_part(evidence, after), strict=True)
    ):
        grad, got = stacked(evidence, grads), stacked(evidence, pieces)
        before = part_of(evidence.tensors[parameter], got.shape, part, parts)
        if before is None or grad.shape != got.shape:
            yield plain(NAME, arm, "parameter", "inconclusive", "pieces make up no whole")
            continue
        x, radius = unscaled(grad, scale, fmt)
        may = first_step(*OPTIMIZERS[spec.optimizer], spec.dtype, before, x.astype(np.float32))
        bad = outside(may, got) & (radius == 0.0)
        if not bad.any():
            yield passed(NAME, arm, "parameter", may)
            continue
        yield _wrong(arm, after, pieces, got, first(bad), (may.lo, may.hi))


def _wrong(
    arm: str,
    name: str,
    pieces: dict[int, F32],
    got: F32,
    at: tuple[int, ...],
    ends: tuple[F64, F64],
) -> Verdict:
    """The element of the rank that holds it."""
    piece, inside = origin([*pieces.values()], got.shape, at)
    place = At(name=name, index=inside, rank=[*pieces][piece])
    expect = between(ends[0][at], ends[1][at])
    return diverged(NAME, arm, "parameter", NOT_THE_STEP, place, number(got[at]), expect)
