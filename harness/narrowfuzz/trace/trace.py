"""The record of a run: numpy arrays, never live tensors, so that rules need no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from numpy.typing import NDArray

from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import Role
from narrowfuzz.trace.address import AtPhase, Phase
from narrowfuzz.trace.snapshots import Moment

#: What is recorded. A: codes and scales. B: dequantised operands. C: graph inputs and outputs only.
Level = Literal["A", "B", "C"]
ErrorPhase = Literal["convert", "forward", "backward"]


@dataclass(frozen=True)
class Site:
    """The identity of a GEMM: module, role of its result, and phase."""

    module: str
    role: Role
    phase: Phase

    def __str__(self) -> str:
        return f"{self.module}.{self.role}/{self.phase}"


@dataclass(frozen=True)
class Seen:
    """One operand as a GEMM received it, as [rows, C] where C is the contracted dimension. The
    fields that are set determine the level."""

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
    #: The format of the codes, where no plan states it.
    format: str = ""


@dataclass(frozen=True)
class SiteTrace:
    """Both operands of one GEMM."""

    site: Site
    a: Seen
    b: Seen


@dataclass(frozen=True)
class LayerCall:
    """One call of one linear inside a model in an eager run, recorded at the layer's boundary.

    ``tensors`` are the tensors that the layer received (input, weight, bias, and grad_output where
    there was a backward), ``outputs`` those that it returned (output, grad_input, grad_weight,
    grad_bias); all are 2-D except a bias, which is 1-D.
    """

    module: str
    #: Number of this call among the module's calls in the same phase of the run, from 0.
    index: int
    phase: Phase
    #: Dtype the layer computed in.
    dtype: str
    tensors: dict[str, F32]
    outputs: dict[str, F32]
    sites: tuple[SiteTrace, ...] = ()
    unobserved: str = ""
    #: First dimension of a 3-D input; 0 if the input was not 3-D.
    batch: int = 0
    #: The tensors that the layer rounds to ``dtype`` before use, where autocast narrows them.
    rounds: frozenset[str] = frozenset({"input", "weight", "bias"})
    #: Number of the forward, and of the checkpointed call, that this call belongs to; a segment of
    #: 0 is outside any checkpoint.
    forward: int = 0
    segment: int = 0
    #: False for a recompute that a function of the model's own makes, not torch's checkpoint.
    checkpointed: bool = True
    #: Those of weight and bias that required no gradient during this call: frozen for one loss.
    frozen: frozenset[str] = frozenset()

    @property
    def plain(self) -> bool:
        """True where a plain linear of ``dtype`` computes the same from the same tensors."""
        return self.dtype == "fp32" or {"input", "weight"} <= self.rounds


class ModuleCall(Protocol):
    """A call of a module: its phase, and the forward and checkpointed segment it belongs to."""

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


def repeated(calls: Iterable[C], same_input: Callable[[C, C], bool]) -> Iterator[tuple[C, C]]:
    """Pairs of a forward call and the recomputed call that repeats it.

    Calls are matched in order within the same module, forward and checkpointed segment. Checkpoints
    that a model makes by itself have no segment, and are recomputed last call first: there a call
    is matched with any of its module that has the same input, if there is one, rather with one of
    the last forward. One forward call may be in several pairs, as a graph whose backward runs again
    recomputes again.
    """
    first: defaultdict[tuple[str, int, int], list[C]] = defaultdict(list)
    again: defaultdict[tuple[str, int, int], list[C]] = defaultdict(list)
    of_module: defaultdict[str, list[C]] = defaultdict(list)
    for call in calls:
        place = call.module, call.forward, call.segment
        if call.phase == "recompute":
            again[place].append(call)
        else:
            first[place].append(call)
            of_module[call.module].append(call)
    for (module, forward, segment), repeats in again.items():
        # sorting is stable: those of other forwards come last
        any_forward = sorted(of_module[module], key=lambda call: call.forward != forward)
        mine = [call for call in any_forward if call.forward == forward] or any_forward
        originals = first[module, forward, segment] if segment else mine
        for n, call in enumerate(sorted(repeats, key=lambda call: call.index)):
            if originals:
                in_order = originals[n % len(originals)]
                several = () if segment else (in_order, *any_forward)
                same = (one for one in several if same_input(one, call))
                yield next(same, in_order), call


@dataclass(frozen=True)
class Multiplied:
    """One matrix multiply that compiled code handed to a kernel: its operands and its result."""

    phase: Phase
    a: Seen
    b: Seen
    result: F32
    #: fp32, bf16 or fp16.
    dtype: str
    bias: F32 | None = None


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention kernel: q, k, v [batch, heads, rows, dim]; out and lse
    (log-sum-exp) as the forward returned them or as the backward received them."""

    phase: Phase
    q: F32
    k: F32
    v: F32
    out: F32
    lse: F32
    #: Mask or bias added to the scores, -inf where a query does not see a key; None: nothing.
    added: F32 | None
    scale: float
    #: The dtype of q, k and v.
    dtype: str = "fp32"
    #: The module that called it, "" where none is known.
    module: str = ""
    #: The name of an argument whose effect on the scores is not known here; "" if there is none.
    unknown: str = ""


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator: its arguments and results, stored in float32 whatever their dtypes
    (fp32, bf16 or fp16)."""

    operator: str
    phase: AtPhase
    #: Number of this call among the operator's calls in the run, from 0.
    index: int
    tensors: Mapping[str, F32]
    outputs: Mapping[str, F32]
    #: The dtype of each tensor and each output, by name.
    dtypes: Mapping[str, str]
    #: The strides of each tensor, in elements, by name.
    strides: Mapping[str, tuple[int, ...]]
    #: Everything else that the results depend on.
    settings: Mapping[str, Any]
    #: The module that called it, "" where none is known.
    module: str = ""
    #: Device type whose kernels ran, as torch names it: "cpu" for the simulated GPU, too.
    device: str = "cpu"
    #: Number of threads that torch used for kernels on the CPU.
    threads: int = 1


#: In place of a Function's name: the model itself failed, so that none was looked for.
WHOLE_MODEL = "the model"


@dataclass(frozen=True)
class Derivative:
    """The check of one argument of a user's ``autograd.Function``: the slope of its forward along
    the worst direction, by finite differences in float64 with their error, and the slope that its
    backward gives there."""

    #: ``module.qualname``, or WHOLE_MODEL.
    function: str
    #: The module that was running.
    module: str
    #: Its name in the signature of ``forward``.
    argument: str
    #: Why it could not be checked; "" if it was.
    why: str
    slope: float
    error: float
    backward: float
    #: The largest difference between ``slope`` and ``backward`` that is allowed.
    allowed: float
    #: Root mean square of the differences over all directions, divided by that of the slopes.
    off: float
    #: The largest ``off`` that is allowed, and the number of directions.
    share: float
    directions: int

    @property
    def wrong(self) -> bool:
        """True where the backward is not the derivative of the forward."""
        return not self.why and abs(self.backward - self.slope) > self.allowed


#: Terminal colour codes and other control characters.
_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


#: A message of Dynamo's that names the error of an operator's shape function only in a later line.
_FAKE = re.compile(
    r"^(.* when making fake tensor call)(\n(?s:.*?): got (\w+\(.*\))$)", re.MULTILINE
)


def message_of(error: BaseException) -> str:
    """An exception's message as plain text. Where Dynamo reports an error of a fake tensor call,
    that error is added to the first line."""
    return _FAKE.sub(r"\1: \3\2", _CODES.sub("", str(error)))


@dataclass(frozen=True)
class RunError:
    """An exception that a library raised: its phase, and the function that raised it."""

    phase: ErrorPhase
    type: str
    message: str
    #: Innermost frame outside torch's dispatch machinery, as ``module.function``.
    where: str
    #: The event in which a library's layers raised it; -1: while they were built.
    event: int = -1
    #: The rank that raised it; -1: no single one.
    rank: int = -1
    #: The linear of the model that was running; "" where none is known.
    layer: str = ""
    #: Tokens, in_features and out_features of the linear's call; None where they are not known.
    sizes: tuple[int, int, int] | None = None
    #: File and line of the innermost frame of all, a user's own included; "" where not known.
    line: str = ""
    #: True: the model's own code raised it, not a library that is tested.
    own: bool = False


#: Classes of changes that a conversion makes; they are part of fingerprints, so they contain no
#: shapes and no values.
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
    """One change that a conversion made, and the module at which it did ("" is the root)."""

    kind: ChangeKind
    module: str
    before: str = ""
    after: str = ""
    #: The parameter whose attributes were lost or changed, "" for the module itself; and the names
    #: of these attributes ("training" for a training flag).
    parameter: str = ""
    attributes: tuple[str, ...] = ()
    #: The change is at a module that the conversion quantised. For tied weights and modules that
    #: have two names, it is enough that one of those that shared was quantised.
    swapped: bool = False


@dataclass(frozen=True)
class Census:
    """What a conversion did to a model."""

    #: Modules that run quantised GEMMs after the conversion.
    converted: tuple[str, ...]
    #: Unrequested changes.
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Trace:
    """One arm's run of one case."""

    arm: str
    #: output, grad_input, grad_weight and, with a bias, grad_bias; 2-D, stored in float32 whatever
    #: the dtype. A model has "<parameter>.grad" instead and, after optimizer steps, "<parameter>".
    #: Where there are several of a kind, the last has the plain name and earlier ones are numbered:
    #: "output@0". For a library's layers: y<forward>, x<forward>.grad@<event> and
    #: <parameter>.grad@<event>.
    outputs: dict[str, F32] = field(default_factory=dict)
    #: A single linear's GEMMs.
    sites: tuple[SiteTrace, ...] = ()
    #: A model's calls of its linears (eager arms).
    calls: tuple[LayerCall, ...] = ()
    #: The matrix multiplies of compiled code.
    multiplied: tuple[Multiplied, ...] = ()
    attention: tuple[AttentionCall, ...] = ()
    #: Calls of operators that a rule judges one by one, where they were recorded.
    operators: tuple[OperatorCall, ...] = ()
    #: Operators and kernels that an eager run called and no rule judges, and why not.
    unjudged: Mapping[str, str] = field(default_factory=dict)
    error: RunError | None = None
    #: Why operands could not be recorded or counted although the arm should expose them.
    unobserved: str = ""
    #: Why nothing can be concluded from this run: for example, nothing was compiled on a compiled
    #: arm, or the device ran out of memory. "" for a usable run.
    unusable_because: str = ""
    #: None where no census was taken.
    census: Census | None = None
    #: Of a sharded run, the trace of each rank; of the unsharded run that it is compared with, the
    #: part of each data-parallel rank.
    ranks: tuple[Trace, ...] = ()
    #: Of a sharded run: gradients reach their sum over ranks as backward computed them, in the
    #: dtype of that sum, and not rounded to their parameter's.
    adds_unrounded: bool = False
    #: Where gradients accumulate over several backwards before a step: parameter -> its gradient
    #: after each backward, in order.
    accumulated_gradients: Mapping[str, tuple[F32, ...]] = field(default_factory=dict)
    #: The events of a library's layers.
    moments: tuple[Moment, ...] = ()
    #: For a library's layers: the parameters that are trained; every parameter's initial value; and
    #: (event, forward) -> the gradient that a backward received for the forward's output.
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
