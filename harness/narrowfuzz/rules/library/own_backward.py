"""O22 of a library's layers: a backward gives every gradient, and in high precision the gradients
belong to its forward.

The last linear of the last layer is y = h W^T + b, as in ``own_backward``; if the forward ran
outside every region, nothing is quantised and the same bound holds. This judges a library's fused
layers, whose inner products are not observed, by their outputs: it finds a forgotten bias, for
example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from narrowfuzz.case.events import Backward, Forward, Reload, Step
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import LAYERS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import steps_of
from narrowfuzz.rules.own_backward import allowed, compared, sides
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Present
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

_NAME, _ROLE = "O22", "gradient"


@dataclass(frozen=True)
class FirstStep:
    """The passes whose gradients are summed for the first step."""

    #: Number of the step's event.
    event: int
    #: (number of the backward's event, number of the forward), in order.
    passes: tuple[tuple[int, int], ...]


def first_step(spec: Spec) -> FirstStep | None:
    """The first step, if all backwards before it went through forwards in high precision and the
    last linear is known; None otherwise."""
    layouts = ("chain", "frozen_first", "dangling")
    if not LAYERS[spec.model].last or spec.layout not in layouts or spec.quantized_init:
        return None
    passes: list[tuple[int, int]] = []
    narrow: set[int] = set()
    forwards = 0
    for i, event, progress in steps_of(spec):
        if isinstance(event, Forward):
            if progress.inner(event) is not None:
                narrow.add(forwards)
            forwards += 1
        elif isinstance(event, Backward):
            passes += [(i, f) for f in event.of]
        elif isinstance(event, Step):
            high = bool(passes) and not narrow & {f for _, f in passes}
            return FirstStep(i, tuple(passes)) if high else None
        elif isinstance(event, Reload):
            return None
    return None


def check_own_backward(evidence: Evidence) -> Iterator[Verdict]:
    """Judges every arm: whether gradients are missing at any step, and the first step's sums."""
    step = first_step(evidence.spec)
    for arm, trace in evidence.in_one_process.items():
        missing = None if trace.error is not None else _missing(evidence, trace)
        if missing is not None:
            yield missing
        elif step is None or trace.error is not None:
            why = "" if step is not None else "no first step in high precision"
            yield plain(_NAME, arm, _ROLE, "not_applicable", why)
        else:
            yield _judge(evidence, arm, trace, step)


def _missing(evidence: Evidence, trace: Trace) -> Verdict | None:
    """The divergence of a trained parameter without a gradient at a step after a backward. Only
    layouts in which every backward reaches every layer are judged."""
    if evidence.spec.layout in ("chain", "twice", "frozen_first"):
        backward = False
        for i, event in enumerate(evidence.spec.events):
            backward = isinstance(event, Backward) or (backward and not isinstance(event, Reload))
            if not (backward and isinstance(event, Step)):
                continue
            backward = False
            there = {name for name in trace.trained if f"{name}.grad@{i}" in trace.outputs}
            missing = sorted(trace.trained - there)
            if missing:
                symptom = f"no gradient of {missing[0].rpartition('.')[2]}"
                at, got = At(event=i, name=f"{missing[0]}.grad"), f"None for {', '.join(missing)}"
                expect = Present(tuple(f"{name}.grad" for name in missing))
                return diverged(_NAME, trace.arm, _ROLE, symptom, at, got, expect)
    return None


def _judge(evidence: Evidence, arm: str, trace: Trace, step: FirstStep) -> Verdict:
    spec, dtype = evidence.spec, evidence.case.spec.dtype
    layer, (weight, bias) = str(spec.layers - 1), LAYERS[spec.model].last
    # passes are stacked: sums over all rows are sums over all passes
    results = {"output": np.vstack([_rows(trace.outputs[f"y{f}"]) for _, f in step.passes])}
    tensors = {"grad_output": np.vstack([_rows(trace.sent[at]) for at in step.passes])}
    for ours, theirs in (("weight", weight), ("bias", bias)):
        grad = trace.outputs.get(f"{layer}.{theirs}.grad@{step.event}")
        if grad is not None:
            results[f"last.{ours}.grad"] = grad
        values = trace.parameters.get(f"{layer}.{theirs}")
        if values is not None and values.size:
            tensors[f"last.{ours}"] = values
    return compared(
        plain(_NAME, arm, _ROLE, "ok"),
        f"belongs to another forward, {LAYERS[spec.model].name}",
        At(event=step.event, name=f"{layer}.{weight}.grad"),
        sides(results, tensors, "last"),
        dtype,
        allowed(dtype, autocast=False),
    )


def _rows(x: F32) -> F32:
    return x.reshape(-1, x.shape[-1])
