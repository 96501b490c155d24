"""Arms: the ways to run a case, and the ladder that a Spec climbs of them, from cheap to expensive.

The first rung where a verdict flips names the guilty stage, so order matters: each rung adds one
thing (a repeat, a recompute, other kernels, tracing, partitioning, code generation, fused
roundings) to the one before. PyTorch's own kernels may also take the place of oneDNN's. Every stage
comes without checkpointing and with each kind of it.

An arm's name identifies it, in files and in fingerprints; whoever wants to know something of an arm
asks the Arm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from narrowfuzz.case.layout import LAYOUTS, layout_of
from narrowfuzz.case.spec import Compile, Spec


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
    #: What of eager's roundings the code may leave out: nothing, the one between a product and its
    #: bias, or all inside of a fused chain.
    fuses: Literal["", "bias", "chains"] = ""
    #: Decomposed graphs: sums may be made in another order than eager's.
    reorders: bool = False
    #: oneDNN is switched off while it runs.
    native: bool = False
    #: The arm that recomputes nothing and is like it in all else; "": itself.
    without: str = ""
    #: It runs on the ranks of the Spec's sharding, which are threads or processes.
    sharded: bool = False
    processes: bool = False

    @property
    def stage(self) -> str:
        """Name of the arm without its checkpointing."""
        return self.without or self.name

    @property
    def words(self) -> str:
        """What a user would call it."""
        parts = [f"torch.compile {self.compiler}" if self.compiler else "eager"]
        parts += [f"with {name}" for name, value in self.options if value]
        parts += ["without oneDNN"] if self.native else []
        parts += [f"on {'processes' if self.processes else 'threads'} as ranks"] * self.sharded
        parts += [_CHECKPOINT_WORDS[self.checkpoint]] if self.checkpoint else []
        return ", ".join(parts)

    @property
    def compiled(self) -> bool:
        """A compiler makes its code."""
        return bool(self.compiler)

    @property
    def recomputes(self) -> bool:
        """Something of its forward runs again in backward."""
        return bool(self.checkpoint)


REFERENCE = Arm("reference", "executed from the recipe's plan, and a float64 twin of the model")
EAGER = Arm("eager", "the real library, eager; run twice")
EAGER_NATIVE = Arm("eager_native", "eager, PyTorch's own kernels in place of oneDNN's", native=True)
AOT_EAGER = Arm("aot_eager", "traced forward and backward graphs, run eagerly", "aot_eager")
PARTITIONED = Arm(
    "aot_eager_decomp_partition",
    "decomposed, partitioned by the minimal cut, run eagerly",
    "aot_eager_decomp_partition",
    reorders=True,
)
INDUCTOR_STRICT = Arm(
    "inductor_strict",
    "Inductor with emulate_precision_casts: eager's roundings kept",
    "inductor",
    (("emulate_precision_casts", True),),
    fuses="bias",  # mm and bias still become one addmm
    reorders=True,
)
SHARDED = Arm("sharded", "eager, on ranks that are threads of one process", sharded=True)
SHARDED_PROCESSES = Arm(
    "sharded_processes",
    "eager, on ranks that are processes, over gloo, or NCCL on GPUs",
    sharded=True,
    processes=True,
)
SHARDED_GRAPHS = Arm(
    "sharded_aot_eager",
    "traced graphs on such processes, run eagerly",
    "aot_eager",
    sharded=True,
    processes=True,  # threads share one Dynamo, and disturb each other in it
)
_OF_LAYOUTS = (
    Arm(layout.arm, layout.title, sharded=True, processes=True) for layout in LAYOUTS if layout.arm
)
INDUCTOR = Arm("inductor", "Inductor as users run it", "inductor", fuses="chains", reorders=True)

_STAGES = (
    EAGER,
    SHARDED,
    SHARDED_PROCESSES,
    SHARDED_GRAPHS,
    *_OF_LAYOUTS,
    EAGER_NATIVE,
    AOT_EAGER,
    PARTITIONED,
    INDUCTOR_STRICT,
    INDUCTOR,
)
_EAGER = (EAGER, EAGER_NATIVE)
#: checkpoint -> suffix of the arm's name and what it says of itself.
_CHECKPOINTS = {
    "full": ("+checkpoint", "everything recomputed"),
    "reentrant": ("+checkpoint_reentrant", "recomputed by the reentrant checkpoint"),
    "selective": ("+checkpoint_selective", "attention and every second matmul kept"),
    "by_torch": ("+checkpoint_by_torch", "recomputed by torch's checkpoint, not the library's"),
    "by_torch_reentrant": (
        "+checkpoint_by_torch_reentrant",
        "recomputed by torch's reentrant checkpoint",
    ),
}
_CHECKPOINT_WORDS = {
    "full": "with checkpointing",
    "reentrant": "with a reentrant checkpoint",
    "selective": "with a selective checkpoint",
    "by_torch": "with torch's checkpoint",
    "by_torch_reentrant": "with torch's reentrant checkpoint",
}
#: Those of converted models; a library may have a checkpoint of its own.
_OF_MODELS = ("none", "full", "reentrant", "selective")


def with_checkpoint(arm: Arm, checkpoint: str) -> Arm:
    """The arm that recomputes as ``checkpoint`` says; "none" is the arm itself."""
    if checkpoint == "none":
        return arm
    suffix, title = _CHECKPOINTS[checkpoint]
    return replace(
        arm,
        name=arm.name + suffix,
        title=f"{arm.title}; {title}",
        checkpoint=checkpoint,
        without=arm.name,
    )


#: The compiled stages that each value of ``Spec.compile`` climbs; the last one takes longest.
COMPILED: dict[Compile, tuple[Arm, ...]] = {
    "none": (),
    "aot_eager": (AOT_EAGER,),
    "aot_eager_decomp_partition": (PARTITIONED,),
    "inductor": (AOT_EAGER, INDUCTOR_STRICT, INDUCTOR),
}

LADDER = (REFERENCE, *(with_checkpoint(arm, c) for arm in _STAGES for c in _OF_MODELS))
#: Every arm there is, those of a library's own layers as well.
_OF_LIBRARY = (with_checkpoint(arm, c) for arm in (EAGER, SHARDED_PROCESSES) for c in _CHECKPOINTS)
BY_NAME = {arm.name: arm for arm in (*LADDER, *_OF_LIBRARY)}


def base_of(spec: Spec) -> Arm:
    """What a Spec's other arms, and its runs on other data, are compared with: eager, or eager
    without oneDNN."""
    return EAGER_NATIVE if spec.native else EAGER


def references(spec: Spec) -> tuple[Arm, ...]:
    """The rungs that others are compared with: on ranks all of one process, else the first."""
    alone = [arm for arm in climb(spec) if spec.sharded and not arm.sharded]
    return base_of(spec), *alone


def climb(spec: Spec) -> tuple[Arm, ...]:
    """The rungs of a Spec, reference excluded (it is always there)."""
    if spec.sharded and spec.layer:  # what it keeps for a process, threads would share
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
