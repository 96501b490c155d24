"""Arms: the ways to run a case, each without checkpointing and with every kind of it.

An arm's name identifies it in files and in fingerprints. Its properties are read from the ``Arm``,
never parsed from the name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

#: Values of ``Spec.compile`` and of the option --compile; ``COMPILED`` lists the arms of each.
Compile = Literal["none", "aot_eager", "aot_eager_decomp_partition", "inductor"]


@dataclass(frozen=True)
class Arm:
    """A way to run a case."""

    name: str
    title: str
    #: torch.compile backend; "" runs eager.
    compiler: str = ""
    options: tuple[tuple[str, object], ...] = ()
    #: What is recomputed in backward, and how: a key of ``CHECKPOINTS``; "" for nothing.
    checkpoint: str = ""
    #: Which of eager's roundings the compiled code may omit: "" none, "bias" the one between a
    #: product and the addition of its bias, "chains" all inside a fused chain of operations.
    fuses: Literal["", "bias", "chains"] = ""
    #: The graphs are decomposed, so sums may be added in another order than in eager.
    reorders: bool = False
    #: oneDNN is switched off during the run.
    native: bool = False
    #: Name of the arm that is identical but recomputes nothing; "" if this arm recomputes nothing.
    without: str = ""
    #: It runs on the ranks of the Spec's sharding, which are threads, or with ``processes``
    #: processes.
    sharded: bool = False
    processes: bool = False

    @property
    def stage(self) -> str:
        """Name of the arm without its checkpointing."""
        return self.without or self.name

    @property
    def words(self) -> str:
        """The arm as it is described to a user."""
        parts = [f"torch.compile {self.compiler}" if self.compiler else "eager"]
        parts += [f"with {name}" for name, value in self.options if value]
        parts += ["without oneDNN"] if self.native else []
        parts += [f"on {'processes' if self.processes else 'threads'} as ranks"] * self.sharded
        parts += [_CHECKPOINT_WORDS[self.checkpoint]] if self.checkpoint else []
        return ", ".join(parts)

    @property
    def compiled(self) -> bool:
        """True if torch.compile compiles the model."""
        return bool(self.compiler)

    @property
    def recomputes(self) -> bool:
        """True if part of the forward runs again in backward."""
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
    "traced graphs, run eagerly, on ranks that are processes",
    "aot_eager",
    sharded=True,
    processes=True,  # threads share one Dynamo, and disturb each other in it
)
INDUCTOR = Arm("inductor", "Inductor as users run it", "inductor", fuses="chains", reorders=True)

#: Kind of checkpointing -> (suffix of the arm's name, addition to the arm's title).
CHECKPOINTS = {
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


def with_checkpoint(arm: Arm, checkpoint: str) -> Arm:
    """The arm with this kind of checkpointing; for "none" the arm itself."""
    if checkpoint == "none":
        return arm
    suffix, title = CHECKPOINTS[checkpoint]
    return replace(
        arm,
        name=arm.name + suffix,
        title=f"{arm.title}; {title}",
        checkpoint=checkpoint,
        without=arm.name,
    )


#: Value of ``Spec.compile`` -> the compiled arms that are run, in this order; the last one takes
#: longest.
COMPILED: dict[Compile, tuple[Arm, ...]] = {
    "none": (),
    "aot_eager": (AOT_EAGER,),
    "aot_eager_decomp_partition": (PARTITIONED,),
    "inductor": (AOT_EAGER, INDUCTOR_STRICT, INDUCTOR),
}
COMPILERS = tuple(word for word, stages in COMPILED.items() if stages)
