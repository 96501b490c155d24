"""One training as plain records, without torch: what the player plays, arms run and scripts show.

Whoever runs a Spec makes a ``Job`` of it. Scripts get its fields put into the player's source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

#: ("open", how) and ("close",): a region, in high precision under None. ("forward", number, turn,
#: mode, narrow): on an input of its own or on the common one's rows, turned by so many; ``narrow``:
#: in a region for itself. ("backward", number, of, retain): through the outputs of these forwards.
#: ("step", to_none) of the optimizer, after which gradients are gone, or zero. ("reload",
#: weights_only, *settings): a new model gets the state, from a file that may hold nothing but
#: weights or anything. ("rollback",): the model gets the state that it began with. ("switch",):
#: what follows says its settings itself. ("handover",): its state goes to another model, or comes
#: from one.
Event = tuple[Any, ...]
#: What a loss is scaled by first.
FIRST_SCALE = 1024.0
#: What gradients are clipped to: the most that their norm may be, or each of them by itself.
CLIPS_AT = 1.0


@dataclass(frozen=True)
class Recompute:
    """What of a converted model backward computes again: its ``regions``, the ``whole``, or both.
    ``how`` is "", "full", "reentrant" or "selective"."""

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
    """A model of a library's own layers, made under ``settings``: the ``order`` in which it calls
    them by name, and how each forward does, by its number (``inside``, ``first``, ``path``). A
    checkpoint of ``by`` wraps ``each`` layer, the ``whole``, or both; only where ``recomputed``
    does backward compute again. ``caching``: layers take is_first_microbatch."""

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
    shard parameters by FSDP, gathered by ``units`` ("" is the rest); ``tensor`` of them, next to
    each other, share the linears named in ``styles`` and cut input and output gradient along the
    dimension in ``cuts``. The ``data`` ones are so many ``replicas`` of each other; of a replica
    so many in a row share ``experts``. With ``ddp``, what DistributedDataParallel is
    called with, that trains replicas of one rank each. 0 ranks or dimension 0: not at all."""

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
    """One training: its events and data's shapes, the optimizer ("" for none) and its options, how
    the model is recomputed and compiled, and what each rank must know of how it is laid out, as the
    player of that asks for it. Without ``input_grad`` the input needs no gradient. ``tied``:
    parameter -> the tensor that it is filled with, if that is not called as it is. ``dtype`` is
    called as in torch."""

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
    recompute: Recompute = Recompute()
    compile: Compile = field(default_factory=Compile)
    layers: Layers | None = None
    layout: Any = None

    @cached_property
    def happens(self) -> tuple[str, ...]:
        """The kinds of its events."""
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
    """What of a training is recorded; with ``adds`` gradients after each backward, with ``steps``
    parameters after each step, too. Of a library's layers what they quantise and multiply if one
    ``listens``, the parameters before the first event (``begins``), and after each event ``states``
    and what is ``pending``."""

    #: Its results.
    keeps: bool = True
    adds: bool = False
    steps: bool = False
    #: The calls of these linears.
    watch: tuple[str, ...] = ()
    #: A context manager that shows the operands of multiplies; where ranks are threads, this rank's
    #: part of what the ``shared`` one shows.
    tap: Callable[..., Any] | None = None
    shared: Callable[..., Any] | None = None
    #: Surrounds all that runs.
    around: Callable[[], Any] | None = None
    listens: bool = False
    begins: bool = False
    states: bool = False
    pending: bool = False
