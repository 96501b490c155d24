"""The definition of an operator: how a call of it is read, and what its results may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.accumulator import U32
from narrowfuzz.numerics.formats import F64, Format, round_to
from narrowfuzz.trace.trace import OperatorCall

#: Unit roundoff of a dtype and half its smallest subnormal number.
UNIT = {"fp32": (U32, 2.0**-150), "bf16": (2.0**-8, 2.0**-134), "fp16": (2.0**-11, 2.0**-25)}
#: The names of dtypes, as torch has them.
TORCH_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Read:
    """A call in the operator's own names: its live input tensors and outputs by name, and
    everything else that it depends on, as literals."""

    tensors: Mapping[str, Any]
    outputs: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """The values that one result may have, element by element."""

    #: The result in float64, and the largest distance from it that a kernel may have before it
    #: rounds to the dtype of the result; 0 where the kernel must be exact.
    centre: F64
    radius: F64
    #: Both ends of the interval, rounded to that dtype; NaN where the result must be NaN.
    lo: F64
    hi: F64
    #: Elements of which nothing is known.
    unknown: NDArray[np.bool_]
    #: The format that a kernel rounds to, if it is known. It may be narrower than the result's: a
    #: library may return its bf16 product in fp32.
    rounds_to: Format | None = None

    @classmethod
    def within(cls, centre: F64, radius: F64, fmt: Format, unknown: NDArray[np.bool_]) -> Expected:
        """The interval of this centre and radius, both ends rounded once to ``fmt``: rounding is
        monotone, so the result lies between. Nothing is known where the radius is not finite."""
        unknown = unknown | ~np.isfinite(radius)
        with np.errstate(all="ignore"):
            ends = np.empty((2, *centre.shape))
            np.subtract(centre, radius, out=ends[0, ...])
            np.add(centre, radius, out=ends[1, ...])
        lo, hi = round_to(ends, fmt, overflow="ieee")
        return cls(centre, radius, lo, hi, unknown, fmt)

    @classmethod
    def between(cls, lo: F64, hi: F64, unknown: NDArray[np.bool_]) -> Expected:
        """An interval of which only the ends are known."""
        with np.errstate(all="ignore"):
            return cls((lo + hi) / 2.0, (hi - lo) / 2.0, lo, hi, unknown)

    @classmethod
    def unwritten(cls, shape: tuple[int, ...]) -> Expected:
        """A result of this shape of which nothing is known yet, for parts to be ``put`` into."""
        centre, radius, lo, hi = (np.zeros(shape) for _ in range(4))
        return cls(centre, radius, lo, hi, np.ones(shape, dtype=bool))

    def put(self, place: slice | int | tuple[slice | int, ...], part: Expected) -> None:
        """Set the expectation of the part of the result at ``place``."""
        for name in ("centre", "radius", "lo", "hi", "unknown"):
            getattr(self, name)[place] = getattr(part, name)

    @classmethod
    def exactly(cls, values: NDArray[Any]) -> Expected:
        """These values and no others; NaN must be NaN."""
        values = values.astype(np.float64)
        return cls.between(values, values, np.zeros(values.shape, dtype=bool))


def hull(one: Expected, other: Expected) -> Expected:
    """The hull of both intervals."""
    lo, hi = np.fmin(one.lo, other.lo), np.fmax(one.hi, other.hi)
    return Expected.between(lo, hi, one.unknown | other.unknown)


def narrow(given: Sequence[Any], made: Sequence[Any]) -> bool:
    """Is one of these tensors bf16 or fp16?"""
    return any(t.is_floating_point() and t.element_size() == 2 for t in (*given, *made))


@dataclass(frozen=True)
class Deviation:
    """A known error in the kernels of a release, which an entry of the ledger may name."""

    name: str
    #: What the kernels do, in the words of ``list`` and the docs.
    words: str
    #: The devices whose kernels do so, by torch's names of device types.
    devices: tuple[str, ...]
    #: What each result is under the deviation, by name, without calls and results that it does not
    #: affect.
    expected: Callable[[OperatorCall], Mapping[str, Expected]]
    #: For kernels: (the tensors that a call takes, those that it returns) -> False if the deviation
    #: never affects such a call, by their dtypes and sizes. For the list of what may affect a user.
    may_affect: Callable[[Sequence[Any], Sequence[Any]], bool] = lambda given, made: True


@dataclass(frozen=True)
class Derived:
    """Results that are computed from the tensors of a call and from what it returned."""

    #: Their names, which come last among the operator's results.
    names: tuple[str, ...]
    #: A function of ``play/``, whose source is copied into scripts: (the call's tensors, what it
    #: returned, its settings) -> these results by name, fp32.
    make: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Operator:
    """An operator of torch. The rules, the watch and the scripts know nothing else about it."""

    name: str
    #: A plural for what is checked in a model that calls it: ``layer norms``.
    words: str
    #: Reads a call: (the arguments of a kernel by their names in its schema, or those of a
    #: function; its result) -> the call. For a kernel that takes lists: for each tensor the call,
    #: or the reason why it is not judged. None if these arguments make it a call of another
    #: operator. Raises Unjudged with the reason if such a call is not judged.
    read: Callable[[Mapping[str, Any], Any], Read | Sequence[Read | str] | None]
    #: What each result may be, by name. Raises Unjudged with the reason if nothing is known.
    expected: Callable[[OperatorCall], Mapping[str, Expected]]
    #: A call of it in Python: the names of its tensors, and ``{}`` fields that ``str.format`` fills
    #: in from its settings.
    expression: str
    #: A call of it in words: ``torch.sum over dim 0 of a bfloat16 tensor of
    #: [4096, 16]``.
    title: Callable[[OperatorCall], str]
    #: The kernels that implement it, as the dispatcher names them.
    kernels: tuple[str, ...] = ()
    #: The arguments that the kernels overwrite. ``read`` gets them as they were before the call,
    #: and as the result, by name, as they are after it.
    overwrites: tuple[str, ...] = ()
    #: Functions of torch that implement it, where torch composes them of several kernels:
    #: ``torch.nn.functional.rms_norm``.
    functions: tuple[str, ...] = ()
    #: Functions of a library that implement it, by module and name: ``torchao.some:function``.
    library: tuple[str, ...] = ()
    #: For functions: an argument -> the result of the same call that is its gradient. The incoming
    #: gradient is the tensor ``grad_output``.
    gradients: Mapping[str, str] = field(default_factory=dict)
    #: For functions that return several results: the position of the one whose gradient that is.
    graded: int = 0
    #: The results that the expression returns: one, or a tuple of several; derived ones come last.
    results: tuple[str, ...] = ("output",)
    #: Result -> results of the same call from which its expected value is computed: if one of these
    #: is wrong, nothing is known of it.
    depends_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Further results, which no kernel returns.
    derived: Derived | None = None
    #: Tensors that a call may be without; the expression takes None for them.
    optional: tuple[str, ...] = ()
    #: Tensors that only record the state that the call found; the expression does not use them.
    state_before: tuple[str, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    #: True if another run of the same call may return other bits, because its kernel adds in no
    #: fixed order, as torch documents.
    unordered: Callable[[OperatorCall], bool] = lambda call: False
    #: True for a function whose products autocast narrows: under autocast it is not judged.
    autocasts: bool = False
    #: True for a function that compiles itself, which it does only while no watch sees it.
    compiles: bool = False
    #: True if linear layers call it, too. Their products are judged layer by layer.
    of_linears: bool = False
    #: A function of ``play/`` that the expression calls, whose source is copied into scripts.
    helper: str = ""

    @property
    def returned(self) -> tuple[str, ...]:
        """The results that a call itself returns: all but the derived ones."""
        made = () if self.derived is None else self.derived.names
        return tuple(name for name in self.results if name not in made)

    def role(self, result: str) -> str:
        """The role in verdicts on that result: the operator's name, followed by the result's if
        there are several."""
        return f"{self.name}.{result}" if len(self.results) > 1 else self.name
