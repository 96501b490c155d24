"""The ladder: arms from cheap to dear, and which of them a Spec climbs.

The first rung where a verdict flips names the guilty stage, so order matters: each rung adds one
thing (a repeat, a recompute, tracing, code generation, fused roundings) to the one before.
"""

from __future__ import annotations

import fnmatch
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.case import Spec
from harness.recipe import unknown


@dataclass(frozen=True)
class Arm:
    """A way to run a case."""

    name: str
    title: str
    #: torch.compile backend; "" runs eager.
    compiler: str = ""
    options: tuple[tuple[str, object], ...] = ()
    #: "": none; "full" and "reentrant" recompute the layer in backward.
    checkpoint: str = ""
    #: Default compile keeps fused chains in fp32: inner roundings may be left out.
    may_elide: bool = False


REFERENCE = Arm("reference", "executed from the recipe's plan in float64")
EAGER = Arm("eager", "the real library, eager; run twice")
EAGER_CHECKPOINT = Arm("eager+checkpoint", "eager, non-reentrant checkpoint", checkpoint="full")
EAGER_REENTRANT = Arm(
    "eager+checkpoint_reentrant", "eager, reentrant checkpoint", checkpoint="reentrant"
)
AOT_EAGER = Arm("aot_eager", "traced forward and backward graphs, run eagerly", "aot_eager")
INDUCTOR_STRICT = Arm(
    "inductor_strict",
    "Inductor with emulate_precision_casts: eager's roundings kept",
    "inductor",
    (("emulate_precision_casts", True),),
    may_elide=True,  # mm and bias still become one addmm
)
INDUCTOR = Arm("inductor", "Inductor as users run it", "inductor", may_elide=True)

LADDER = (
    REFERENCE,
    EAGER,
    EAGER_CHECKPOINT,
    EAGER_REENTRANT,
    AOT_EAGER,
    INDUCTOR_STRICT,
    INDUCTOR,
)
BY_NAME = {arm.name: arm for arm in LADDER}


def climb(spec: Spec) -> tuple[Arm, ...]:
    """The rungs of a Spec, reference excluded (it is always there)."""
    rungs = [EAGER]
    if spec.checkpoint != "none":
        rungs.append(EAGER_CHECKPOINT if spec.checkpoint == "full" else EAGER_REENTRANT)
    if spec.compile != "none":
        rungs.append(AOT_EAGER)
    if spec.compile == "inductor":
        rungs += [INDUCTOR_STRICT, INDUCTOR]
    return tuple(rungs)


def select_arms(globs: Sequence[str]) -> frozenset[str]:
    """Names of the arms matching any glob (all if none is given). Raises ValueError for a glob that
    matches nothing."""
    chosen: set[str] = set()
    for glob in globs:
        hits = fnmatch.filter(BY_NAME, glob)
        if not hits:
            raise ValueError(unknown("arm", glob, BY_NAME))
        chosen.update(hits)
    return frozenset(chosen or BY_NAME)


def unavailable(arm: Arm) -> str:
    """Why this machine cannot run the arm, or "" if it can."""
    if arm.compiler != "inductor":
        return ""
    if not (shutil.which("g++") or shutil.which("clang++")):
        return "Inductor's CPU code needs a C++ compiler: install g++"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.is_file():
        return f"Inductor's CPU code needs the Python headers: {headers} is missing"
    return ""
