"""What a run left behind: numpy arrays, never live tensors, so rules need no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Literal, Protocol, TypeVar

from numpy.typing import NDArray

from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import Role
from narrowfuzz.trace.address import AtPhase, Phase
from narrowfuzz.trace.snapshots import Moment

#: A: codes and scales. B: dequantised operands. C: graph inputs and outputs only.
Level = Literal["A", "B", "C"]
ErrorPhase = Literal["convert", "forward", "backward"]


@dataclass(frozen=True)
class Site:
    """The name under which something was multiplied."""

    module: str
    role: Role
    phase: Phase

    def __str__(self) -> str:
        return f"{self.module}.{self.role}/{self.phase}"


@dataclass(frozen=True)
class Seen:
    """One operand as a GEMM saw it, canonical [rows, C]; which fields are set gives the level."""

    #: Level A: element codes.
    codes: NDArray[Any] | None = None
    #: Level A: multiplicative fp32 scale s, or E8M0 bytes; None where the kernel never sees it.
    scale: NDArray[Any] | None = None
    #: True: ``scale`` holds fp32(1/s), as scaled-GEMM kernels take it.
    scale_is_inverse: bool = False
    #: max|x| per granule, where the library exposes it.
    amax: F32 | None = None
    #: Level B: dequantised values that entered the multiply.
    values: F32 | None = None
    #: The codes' format, where they were seen without a plan that tells it.
    format: str = ""


@dataclass(frozen=True)
class SiteTrace:
    """Both operands of one GEMM."""

    site: Site
    a: Seen
    b: Seen


@dataclass(frozen=True)
class LayerCall:
    """One call of one linear inside a model, seen from the layer's own edges in an eager run.

    ``tensors`` are what the layer got (input, weight, bias, and grad_output where a gradient came
    back), ``outputs`` what it returned (output, grad_input, grad_weight, grad_bias); all 2-D.
    """

    module: str
    #: This module's how many-th call of the same phase in the run.
    index: int
    phase: Phase
    #: Dtype the layer computed in.
    dtype: str
    tensors: dict[str, F32]
    outputs: dict[str, F32]
    sites: tuple[SiteTrace, ...] = ()
    unobserved: str = ""
    #: First dimension of a 3-D input; 0: it was 2-D.
    batch: int = 0
    #: What the layer rounds to ``dtype`` before it uses it, where autocast makes that narrower.
    rounds: frozenset[str] = frozenset({"input", "weight", "bias"})
    #: The run's how many-th forward it belongs to, and how many-th checkpointed call; 0: none.
    forward: int = 0
    segment: int = 0

    @property
    def plain(self) -> bool:
        """True where a linear of ``dtype`` computes the same from the same tensors."""
        return self.dtype == "fp32" or {"input", "weight"} <= self.rounds


class ModuleCall(Protocol):
    """A call of a module, in which phase and as part of what."""

    @property
    def module(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def forward(self) -> int: ...
    @property
    def segment(self) -> int: ...


C = TypeVar("C", bound=ModuleCall)


def repeated(calls: Iterable[C]) -> Iterator[tuple[C, C]]:
    """Each recomputed call behind the forward call it repeats: of the same checkpointed call in the
    same forward, in order. A graph that runs backward again recomputes again."""
    first: defaultdict[tuple[str, int, int], list[C]] = defaultdict(list)
    again: defaultdict[tuple[str, int, int], list[C]] = defaultdict(list)
    for call in calls:
        (again if call.phase == "recompute" else first)[
            call.module, call.forward, call.segment
        ].append(call)
    for place, repeats in again.items():
        in_order = sorted(repeats, key=lambda call: call.index)
        yield from zip(cycle(first[place]), in_order, strict=False)


@dataclass(frozen=True)
class Multiplied:
    """One matrix multiply a compiled artefact handed to a kernel, operands and result as seen."""

    phase: Phase
    a: Seen
    b: Seen
    result: F32
    #: fp32, bf16 or fp16.
    dtype: str
    bias: F32 | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one attention kernel: q, k, v [batch, heads, rows, dim]; out and lse as the
    forward returned them or as the backward got them back."""

    phase: Phase
    q: F32
    k: F32
    v: F32
    out: F32
    lse: F32
    #: What is added to the scores, -inf where a query does not see a key; None: nothing.
    added: F32 | None
    scale: float
    #: Of q, k and v.
    dtype: str = "fp32"
    #: The module that called it, "" where none is known.
    module: str = ""
    #: An argument that changes the scores in a way that is not known here.
    unknown: str = ""


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator: what it was given and what it returned, float32 carrying their
    dtypes (fp32, bf16 or fp16)."""

    operator: str
    phase: AtPhase
    #: This operator's how many-th call in the run.
    index: int
    tensors: Mapping[str, F32]
    outputs: Mapping[str, F32]
    #: Of both, by name.
    dtypes: Mapping[str, str]
    #: How the tensors lay in memory, by name: steps between elements along each dimension.
    strides: Mapping[str, tuple[int, ...]]
    #: Everything else that the results depend on.
    settings: Mapping[str, Any]
    #: The module that called it, "" where none is known.
    module: str = ""
    #: Whose kernels ran, as torch names the type of the device. The simulated GPU's are a CPU's.
    device: str = "cpu"
    #: Threads that a CPU's kernel shared its work between.
    threads: int = 1


@dataclass(frozen=True)
class Derivative:
    """One argument of one ``autograd.Function`` of a user's: the slope of its forward in float64,
    by finite differences with their error, and what its backward gives, along one direction."""

    #: ``module.qualname``.
    function: str
    #: The module that was running.
    module: str
    #: As ``forward`` names it.
    argument: str
    #: Why nothing can be said; "".
    why: str
    slope: float
    error: float
    backward: float
    #: What these may differ by.
    allowed: float
    #: Root mean square of the difference over all directions, a share of the slopes'.
    off: float
    #: What that may be, and how many directions it is of.
    share: float
    directions: int

    @property
    def wrong(self) -> bool:
        """The backward is not the derivative of the forward."""
        return not self.why and abs(self.backward - self.slope) > self.allowed


#: What colours a terminal, and all else that is no text.
_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


#: Where Dynamo says which error an operator's shape function raised, a line later.
_FAKE = re.compile(
    r"^(.* when making fake tensor call)(\n(?s:.*?): got (\w+\(.*\))$)", re.MULTILINE
)


def message_of(error: BaseException) -> str:
    """What an exception says, as plain text; of an error that Dynamo met in its first line which
    error that was."""
    return _FAKE.sub(r"\1: \3\2", _CODES.sub("", str(error)))


@dataclass(frozen=True)
class RunError:
    """An exception a library raised: in which phase, and from which of its functions."""

    phase: ErrorPhase
    type: str
    message: str
    #: Innermost frame outside torch's dispatch machinery, as ``module.function``.
    where: str
    traceback: str
    #: In which event a library's layers raised it; -1: while they were built.
    event: int = -1
    #: The rank that raised it; -1: no single one.
    rank: int = -1
    #: The linear of a model that was running; "" where none is known.
    layer: str = ""
    #: The tokens, in_features and out_features of that call; None where they are not known.
    sizes: tuple[int, int, int] | None = None


#: Classes of what a conversion changed; no shapes, no values.
ChangeKind = Literal[
    "left unconverted",
    "second name left unconverted",
    "converted unasked",
    "own forward lost",
    "forward changed",
    "module type changed",
    "module missing",
    "module added",
    "shared module split",
    "training flag changed",
    "hooks lost",
    "attributes lost",
    "attributes changed",
    "tied weights untied",
    "weights tied",
    "parameter missing",
    "parameter added",
    "parameter type changed",
    "parameter shape changed",
    "parameter dtype changed",
    "parameter device changed",
    "parameter order changed",
    "parameter hooks lost",
    "parameter attributes lost",
    "requires_grad changed",
    "buffer missing",
    "buffer added",
    "buffer changed",
    "state_dict keys changed",
]


@dataclass(frozen=True)
class Change:
    """One thing a conversion changed, and the module it happened at ("" is the root)."""

    kind: ChangeKind
    module: str
    before: str = ""
    after: str = ""
    #: Of lost attributes and a training flag: whose, of the module's parameters, "" for its own;
    #: and their names.
    parameter: str = ""
    attributes: tuple[str, ...] = ()
    #: It is at a module that conversion put another one in the place of, or gave other parameters,
    #: as it was asked to; of what was one with another, at either.
    swapped: bool = False


@dataclass(frozen=True)
class Census:
    """What a conversion did to a model."""

    #: Modules that run quantised GEMMs now.
    converted: tuple[str, ...]
    #: What it changed without being asked to.
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Trace:
    """One arm's run of one case."""

    arm: str
    #: output, grad_input, grad_weight and, with a bias, grad_bias; 2-D, float32 carrying the dtype.
    #: A model has "<parameter>.grad" instead and, after optimizer steps, "<parameter>". Of several
    #: of a kind the last has the plain name, those before it have their numbers: "output@0". Of a
    #: library's layers y<forward>, x<forward>.grad@<event> and <parameter>.grad@<event>.
    outputs: dict[str, F32] = field(default_factory=dict)
    #: A single linear's GEMMs.
    sites: tuple[SiteTrace, ...] = ()
    #: A model's calls of its linears (eager arms).
    calls: tuple[LayerCall, ...] = ()
    #: What compiled artefacts multiplied.
    multiplied: tuple[Multiplied, ...] = ()
    attention: tuple[AttentionCall, ...] = ()
    #: Calls of operators that are judged by themselves, where they were watched.
    operators: tuple[OperatorCall, ...] = ()
    #: What an eager run called that nobody judges by itself, and why: an operator, or a kernel.
    unjudged: Mapping[str, str] = field(default_factory=dict)
    error: RunError | None = None
    #: Why operands could not be seen or counted although the arm should expose them.
    unobserved: str = ""
    #: Why this run says nothing at all: the arm did not do what its name says.
    void: str = ""
    #: None: not taken.
    census: Census | None = None
    #: Of a sharded run what each rank left; of the same unsharded, each data-parallel rank's piece.
    ranks: tuple[Trace, ...] = ()
    #: Of a training whose gradients add up before a step, by parameter: its gradient after each
    #: backward, in order.
    added: Mapping[str, tuple[F32, ...]] = field(default_factory=dict)
    #: Of a library's layers, how things stood after each event.
    moments: tuple[Moment, ...] = ()
    #: Of them, the parameters that train, every parameter as the training began, and by event and
    #: forward what a backward sent into the forward's output.
    trained: frozenset[str] = frozenset()
    parameters: Mapping[str, F32] = field(default_factory=dict)
    sent: Mapping[tuple[int, int], F32] = field(default_factory=dict)

    def at(self, role: Role, phase: Phase) -> SiteTrace | None:
        """The site of ``role`` in ``phase``, or None where it was not recorded."""
        for record in self.sites:
            if record.site.role == role and record.site.phase == phase:
                return record
        return None

    def main_site(self, role: Role) -> SiteTrace | None:
        return self.at(role, "forward" if role == "output" else "backward")
