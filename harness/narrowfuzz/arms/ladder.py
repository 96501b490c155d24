"""The ladder: arms from cheap to dear, and which of them a Spec climbs.

The first rung where a verdict flips names the guilty stage, so order matters: each rung adds one
thing (a repeat, a recompute, other kernels, tracing, partitioning, code generation, fused
roundings) to the one before. PyTorch's own kernels may also take the place of oneDNN's. Every stage
comes without checkpointing and with each kind of it.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import shutil
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from narrowfuzz.case import Compile, Spec
from narrowfuzz.machine import onednn_stays
from narrowfuzz.recipe import unknown


@dataclass(frozen=True)
class Arm:
    """A way to run a case."""

    name: str
    title: str
    #: torch.compile backend; "" runs eager.
    compiler: str = ""
    options: tuple[tuple[str, object], ...] = ()
    #: "": none; otherwise what of the model is recomputed in backward, and how.
    checkpoint: str = ""
    #: Default compile keeps fused chains in fp32: inner roundings may be left out.
    may_elide: bool = False
    #: oneDNN is switched off while it runs.
    native: bool = False

    @property
    def stage(self) -> str:
        """The arm without its checkpointing."""
        return self.name.split("+")[0]


REFERENCE = Arm("reference", "executed from the recipe's plan, and a float64 twin of the model")
EAGER = Arm("eager", "the real library, eager; run twice")
EAGER_NATIVE = Arm("eager_native", "eager, PyTorch's own kernels in place of oneDNN's", native=True)
AOT_EAGER = Arm("aot_eager", "traced forward and backward graphs, run eagerly", "aot_eager")
PARTITIONED = Arm(
    "aot_eager_decomp_partition",
    "decomposed, partitioned by the minimal cut, run eagerly",
    "aot_eager_decomp_partition",
)
INDUCTOR_STRICT = Arm(
    "inductor_strict",
    "Inductor with emulate_precision_casts: eager's roundings kept",
    "inductor",
    (("emulate_precision_casts", True),),
    may_elide=True,  # mm and bias still become one addmm
)
INDUCTOR = Arm("inductor", "Inductor as users run it", "inductor", may_elide=True)

_STAGES = (EAGER, EAGER_NATIVE, AOT_EAGER, PARTITIONED, INDUCTOR_STRICT, INDUCTOR)
_EAGER = (EAGER, EAGER_NATIVE)
#: checkpoint -> suffix of the arm's name and what it says of itself.
_CHECKPOINTS = {
    "full": ("+checkpoint", "everything recomputed"),
    "reentrant": ("+checkpoint_reentrant", "recomputed by the reentrant checkpoint"),
    "selective": ("+checkpoint_selective", "attention and every second matmul kept"),
}


def with_checkpoint(arm: Arm, checkpoint: str) -> Arm:
    """The arm that recomputes as ``checkpoint`` says; "none" is the arm itself."""
    if checkpoint == "none":
        return arm
    suffix, title = _CHECKPOINTS[checkpoint]
    return replace(
        arm, name=arm.name + suffix, title=f"{arm.title}; {title}", checkpoint=checkpoint
    )


#: The compiled stages that each value of ``Spec.compile`` climbs; the last one is the dearest.
_COMPILED: dict[Compile, tuple[Arm, ...]] = {
    "none": (),
    "aot_eager": (AOT_EAGER,),
    "aot_eager_decomp_partition": (PARTITIONED,),
    "inductor": (AOT_EAGER, INDUCTOR_STRICT, INDUCTOR),
}

LADDER = (
    REFERENCE,
    *(with_checkpoint(arm, c) for arm in _STAGES for c in ("none", *_CHECKPOINTS)),
)
BY_NAME = {arm.name: arm for arm in LADDER}


def base_of(spec: Spec) -> Arm:
    """The rung that a Spec's others, and its runs on other data, are compared with."""
    return EAGER_NATIVE if spec.native else EAGER


def climb(spec: Spec) -> tuple[Arm, ...]:
    """The rungs of a Spec, reference excluded (it is always there)."""
    rungs: list[Arm] = []
    for arm in (base_of(spec),) if spec.native or spec.kernels == "default" else _EAGER:
        rungs += dict.fromkeys((arm, with_checkpoint(arm, spec.checkpoint)))
    rungs += [with_checkpoint(arm, spec.checkpoint) for arm in _COMPILED[spec.compile]]
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


def rungs_of(arms: Collection[str], device: str = "cpu") -> tuple[Compile, ...]:
    """The values of ``Spec.compile`` with which one of these arms runs here; eager if none does."""
    stages = {BY_NAME[name].stage for name in arms if not unavailable(BY_NAME[name], device)}
    own: dict[Compile, set[str]] = {
        r: {a.stage for a in climbed} for r, climbed in _COMPILED.items()
    }
    own["none"] = {arm.stage for arm in _EAGER}
    own["inductor"] -= own["aot_eager"]  # which has slices of its own
    return tuple(rung for rung, wanted in own.items() if stages & wanted) or ("none",)


#: What eager's roundings need besides where Triton generates the code: it divides by approximation
#: and flushes what is subnormal.
_EXACT = {"eager_numerics.division_rounding": True, "eager_numerics.disable_ftz": True}


def options_on(arm: Arm, device: str) -> dict[str, object]:
    """The arm's compile options on a device, as torch calls it."""
    exact = _EXACT if arm.options and device != "cpu" else {}
    return dict(arm.options) | exact


def approximate(arm: Arm, device: str) -> bool:
    """May the arm's code on a device divide by approximation? Source: ``div.full.f32`` of the PTX
    ISA, up to 2 units in the last place off."""
    return arm.compiler == "inductor" and not arm.options and device != "cpu"


def natives(arms: Collection[str], device: str) -> bool:
    """May PyTorch's own kernels run in place of oneDNN's here?"""
    return EAGER_NATIVE.name in arms and not unavailable(EAGER_NATIVE, device)


def unavailable(arm: Arm, device: str = "cpu") -> str:
    """Why this machine cannot run the arm on the device, or "" if it can."""
    if arm.native:
        return "oneDNN is a CPU's" if device != "cpu" else onednn_stays()
    if arm.compiler and device == "simulated":
        return "compilers ask the GPU, which is simulated, what it is"
    if arm.compiler != "inductor":
        return ""
    needed, of = ["g++", "clang++"], "CPU"
    if device.startswith("cuda"):
        needed, of = ["gcc", "clang", "cc"], "Triton"
        if importlib.util.find_spec("triton") is None:
            return "Inductor's GPU code needs Triton: pip install triton"
    if not any(map(shutil.which, needed)):
        return f"Inductor's {of} code needs a compiler: install {needed[0]}"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.is_file():
        return f"Inductor's {of} code needs the Python headers: {headers} is missing"
    return ""
