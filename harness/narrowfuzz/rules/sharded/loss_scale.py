"""S14: all ranks scale the loss alike, depending on whether the gradients of all are finite."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowfuzz.play.job import FIRST_SCALE
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, number, plain
from narrowfuzz.rules.sharded.evidence import arm_of, before_steps, run_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import between
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict


def check_loss_scale(evidence: Evidence) -> Iterator[Verdict]:
    """S14: on every rank a step doubles the scale if the gradients of all ranks are finite, and
    halves it if one of them is not."""
    arm, run, steps = arm_of(evidence), run_of(evidence), evidence.spec.steps
    if run is None:
        return
    if evidence.spec.loss_scaling == "none" or not evidence.spec.optimizes:
        yield plain("S14", arm, "loss_scale", "not_applicable", "no loss is scaled")
        return
    scale = FIRST_SCALE
    for step in range(steps):
        scale *= 2.0 if all(_finite(trace, step) for trace in run.ranks) else 0.5
        for rank, trace in enumerate(run.ranks):
            scales = list(before_steps(trace, "loss_scale", steps).items())
            if step >= len(scales):  # this rank made fewer steps
                continue
            name, found = scales[step]
            got = float(found.reshape(-1)[0])
            if got != scale:
                at, expect = At(name=name, rank=rank), between(scale, scale)
                symptom = "does not follow from the gradients of all ranks"
                yield diverged("S14", arm, "loss_scale", symptom, at, number(got), expect)
                return
    yield plain("S14", arm, "loss_scale", "ok")


def _finite(trace: Trace, step: int) -> bool:
    """Are this rank's gradients of this step finite?"""
    kinds = {kind for kind in map(_kind, trace.outputs) if kind.endswith(".grad")}
    every = (list(before_steps(trace, kind, step + 1).values()) for kind in kinds)
    return all(np.isfinite(of[step]).all() for of in every if len(of) > step)


def _kind(name: str) -> str:
    return name_of(name).kind
