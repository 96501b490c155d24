"""One training as plain records, without torch: the player plays it, arms run it, scripts show it.

A ``Job`` is made from each Spec that runs. Scripts contain the player's source with the values of
its fields substituted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

#: ("open", how) and ("close",): a region, in high precision if ``how`` is None. ("forward", number,
#: row_shift, mode, narrow): on an input of its own or on the common one, with rows rolled by
#: ``row_shift``; ``narrow``: in a region of its own. ("backward", number, of, retain): through the
#: outputs of the forwards ``of``. ("step", to_none): the optimizer steps, then gradients are None,
#: or zero.
#: ("reload", weights_only, *settings): a new model loads the state, from a file that may hold only
#: weights, or anything. ("rollback",): the model loads the state that it began with. ("switch",):
#: later events state their settings themselves. ("handover",): the state goes to another model, or
#: comes from one.
Event = tuple[Any, ...]
#: The initial scale of a loss.
FIRST_SCALE = 1024.0
#: The clipping limit: of the gradients' norm, or of the absolute value of each number.
CLIPS_AT = 1.0


@dataclass(frozen=True)
class Recompute:
    """The parts of a converted model that backward recomputes: its ``regions``, the ``whole``, or
    both. ``how`` is "", "full", "reentrant" or "selective"."""

    how: str = ""
    regions: tuple[str, ...] = ()
    whole: bool = True


@dataclass(frozen=True)
class Compile:
    """How the model is compiled: torch.compile's backend, "" for none, and its other arguments."""

    backend: Any = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_budget: float = 1.0


@dataclass(frozen=True)
class Layers:
    """A model of a library's own layers, created under ``settings``: the ``order`` in which it
    calls them by name, and each forward's options by its number (``hows``: ``inside``, ``first``,
    ``path``). A checkpoint of ``by`` wraps ``each`` layer, the ``whole``, or both; backward
    recomputes only if ``recomputed``. ``caching``: layers take is_first_microbatch."""

    order: tuple[str, ...]
    layout: str = ""
    hows: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    frozen: bool = False
    recomputed: bool = False
    each: bool = False
    whole: bool = False
    by: str = "library"
    reentrant: bool = False
    caching: bool = False
    settings: Any = None


@dataclass(frozen=True)
class Mesh:
    """A model laid out over ranks: ``data`` of them share the rows [batch, rows] of the input and
    shard parameters by FSDP, in ``units`` ("" is the rest); ``tensor`` of them, next to each other,
    share the linears named in ``styles`` and cut input and output gradient along the dimension in
    ``cuts``. The ``data`` ranks form ``replicas`` of the model; in each, ``experts`` consecutive
    ranks share experts. ``ddp``: the options of DistributedDataParallel, which then trains replicas
    of one rank each. 0 ranks or dimension 0: not at all."""

    data: int
    tensor: int
    rows: tuple[int, ...]
    widths: Mapping[str, int]
    cuts: Mapping[str, int]
    styles: Mapping[str, str]
    units: tuple[str, ...]
    narrow_styles: bool = False
    sequence: bool = False
    local_output: bool = True
    reduces: str = ""
    averages: bool = True
    precomputes: bool = False
    forces_sums: bool = False
    replicas: int = 0
    experts: int = 0
    ddp: Mapping[str, Any] | None = None

    @property
    def shape(self) -> dict[str, int]:
        """The dimensions of the device mesh, by name."""
        names = "replicas", "data", "tensor"
        sizes = self.replicas, self.data // max(self.replicas, 1), self.tensor
        return {n: size for n, size in zip(names, sizes, strict=True) if size}


@dataclass(frozen=True)
class Resumed:
    """A training that goes on in another mesh after its handover."""

    before: Mesh
    after: Mesh


@dataclass(frozen=True)
class Job:
    """One training: its events, the shapes of its data, the optimizer ("" for none) and its
    options, how the model is recomputed and compiled, and the ``layout`` over ranks, as the player
    of that layout needs it. Without ``input_grad`` the input needs no gradient. ``tied``: parameter
    -> the tensor that fills it, if that has another name. ``buffers`` are changed by forwards, and
    results at the end. ``dtype`` is torch's name of it."""

    events: tuple[Event, ...]
    dtype: str
    device: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    ids: bool = False
    input_grad: bool = True
    optimizer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    loss_scaling: str = "none"
    clipping: str = "none"
    autocast: bool = False
    input_layout: str = "contiguous"
    grad_layout: str = "contiguous"
    lifecycle: str = "none"
    kernels: str = "default"
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    recompute: Recompute = Recompute()
    compile: Compile = field(default_factory=Compile)
    layers: Layers | None = None
    layout: Any = None

    @cached_property
    def happens(self) -> tuple[str, ...]:
        """The kinds of its events, each once."""
        return tuple(dict.fromkeys(event for event, *_ in self.events))

    @cached_property
    def moves(self) -> bool:
        """Do steps change the parameters?"""
        return bool(self.options.get("lr"))

    @cached_property
    def low_bit(self) -> bool:
        """Is the optimizer one of torchao's, which keep their moments in few bits?"""
        return self.optimizer.endswith(("bit", "Fp8"))

    @cached_property
    def modes(self) -> tuple[str, ...]:
        """The modes of its forwards."""
        forwards = (how for event, *how in self.events if event == "forward")
        return tuple(dict.fromkeys(how[2] for how in forwards))


@dataclass(frozen=True)
class Taps:
    """The parts of a training that are recorded; with ``adds`` also gradients after each backward,
    with ``steps`` parameters after each step. For a library's layers: what they quantise and
    multiply (``listens``), the parameters before the first event (``begins``), and after each event
    the library's state (``states``) and its temporary buffers (``pending``)."""

    #: Record its results.
    keeps: bool = True
    adds: bool = False
    steps: bool = False
    #: Record the calls of these linears.
    watch: tuple[str, ...] = ()
    #: A context manager that emits the operands of multiplies; if ranks are threads, this rank's
    #: part of what the ``shared`` one emits.
    tap: Callable[..., Any] | None = None
    shared: Callable[..., Any] | None = None
    #: A context manager around all events.
    around: Callable[[], Any] | None = None
    #: A context manager around forwards in inference mode.
    inference: Callable[[], Any] | None = None
    listens: bool = False
    begins: bool = False
    states: bool = False
    pending: bool = False
