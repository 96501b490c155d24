"""The ladder of arms that a Spec climbs, from cheap to expensive.

The first rung at which a verdict changes identifies the stage at fault, so the order matters: each
rung adds one thing (a repeat, a recompute, other kernels, tracing, partitioning, code generation,
fused roundings) to the one before. PyTorch's own kernels may also replace oneDNN's.
"""

from __future__ import annotations

from narrowfuzz.case.arm import (
    CHECKPOINTS,
    COMPILED,
    EAGER,
    EAGER_NATIVE,
    REFERENCE,
    SHARDED,
    SHARDED_GRAPHS,
    SHARDED_PROCESSES,
    Arm,
    with_checkpoint,
)
from narrowfuzz.case.layout import LAYOUTS, layout_of
from narrowfuzz.case.spec import Spec

_OF_LAYOUTS = (
    Arm(layout.arm, layout.title, sharded=True, processes=True) for layout in LAYOUTS if layout.arm
)
_STAGES = (
    EAGER,
    SHARDED,
    SHARDED_PROCESSES,
    SHARDED_GRAPHS,
    *_OF_LAYOUTS,
    EAGER_NATIVE,
    *dict.fromkeys(arm for stages in COMPILED.values() for arm in stages),
)
_EAGER = (EAGER, EAGER_NATIVE)
#: Checkpoints of converted models; a library may have a checkpoint function of its own.
_OF_MODELS = ("none", "full", "reentrant", "selective")

LADDER = (REFERENCE, *(with_checkpoint(arm, c) for arm in _STAGES for c in _OF_MODELS))
#: Arms of a library's own layers.
_OF_LIBRARY = (with_checkpoint(arm, c) for arm in (EAGER, SHARDED_PROCESSES) for c in CHECKPOINTS)
#: Name of an arm -> the arm, for all arms.
BY_NAME = {arm.name: arm for arm in (*LADDER, *_OF_LIBRARY)}


def base_of(spec: Spec) -> Arm:
    """The arm that a Spec's other arms, and its runs on other data, are compared with: eager, or
    eager without oneDNN."""
    return EAGER_NATIVE if spec.native else EAGER


def references(spec: Spec) -> tuple[Arm, ...]:
    """The rungs that others are compared with: the base; for a Spec on ranks also the other rungs
    that run in one process."""
    single_process = [arm for arm in climb(spec) if spec.sharded and not arm.sharded]
    return base_of(spec), *single_process


def climb(spec: Spec) -> tuple[Arm, ...]:
    """The rungs of a Spec in order, without the reference, which every Spec has."""
    if spec.sharded and spec.layer:  # threads would share the state that a library has per process
        of = dict.fromkeys(("none", spec.checkpoint))
        return *(with_checkpoint(EAGER, c) for c in of), with_checkpoint(
            SHARDED_PROCESSES, spec.checkpoint
        )
    if spec.sharded:
        layout = layout_of(spec)
        if layout.arm:
            return EAGER, with_checkpoint(BY_NAME[layout.arm], spec.checkpoint)
        stages = [SHARDED] if layout.threads else []
        graphs = [SHARDED_GRAPHS] if spec.compile == "aot_eager" else []
        stages += [SHARDED_PROCESSES] if spec.sharding.processes or graphs or not stages else []
        stages += graphs
        return EAGER, *(with_checkpoint(arm, spec.checkpoint) for arm in stages)
    rungs: list[Arm] = []
    for arm in (base_of(spec),) if spec.native or spec.kernels == "default" else _EAGER:
        rungs += dict.fromkeys((arm, with_checkpoint(arm, spec.checkpoint)))
    rungs += [with_checkpoint(arm, spec.checkpoint) for arm in COMPILED[spec.compile]]
    return tuple(rungs)
