"""What an operator is: how a call of it is read, and what its results may be."""

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
    """A call of a kernel in the operator's words: tensors that go in and come out, live, by name,
    and everything else that it depends on, as literals."""

    tensors: Mapping[str, Any]
    outputs: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """What one result may be, element by element."""

    #: The result in float64, and how far from it a kernel may be before it rounds to the dtype of
    #: the result; 0 where the kernel must be exact.
    centre: F64
    radius: F64
    #: Both ends of the interval, rounded to that dtype; NaN where the result must be NaN.
    lo: F64
    hi: F64
    #: Elements of which nothing is known.
    unknown: NDArray[np.bool_]
    #: The format that a kernel rounds to, where one is known: a library may hand its bf16 product
    #: on in fp32.
    rounds_to: Format | None = None

    @classmethod
    def within(cls, centre: F64, radius: F64, fmt: Format, unknown: NDArray[np.bool_]) -> Expected:
        """Both ends rounded once to ``fmt``: rounding is monotone, so the result lies between.
        Nothing is known where the radius is no number."""
        unknown = unknown | ~np.isfinite(radius)
        with np.errstate(all="ignore"):
            ends = np.empty((2, *centre.shape))
            np.subtract(centre, radius, out=ends[0, ...])
            np.add(centre, radius, out=ends[1, ...])
        lo, hi = round_to(ends, fmt, overflow="ieee")
        return cls(centre, radius, lo, hi, unknown, fmt)

    @classmethod
    def between(cls, lo: F64, hi: F64, unknown: NDArray[np.bool_]) -> Expected:
        """Of whose interval no more is known than its ends."""
        with np.errstate(all="ignore"):
            return cls((lo + hi) / 2.0, (hi - lo) / 2.0, lo, hi, unknown)

    @classmethod
    def unwritten(cls, shape: tuple[int, ...]) -> Expected:
        """Of a result of which nothing is known, for parts to be ``put`` into."""
        centre, radius, lo, hi = (np.zeros(shape) for _ in range(4))
        return cls(centre, radius, lo, hi, np.ones(shape, dtype=bool))

    def put(self, place: slice | int | tuple[slice | int, ...], part: Expected) -> None:
        """What is known of a part of the result."""
        for name in ("centre", "radius", "lo", "hi", "unknown"):
            getattr(self, name)[place] = getattr(part, name)

    @classmethod
    def exactly(cls, values: NDArray[Any]) -> Expected:
        """These and no others, NaN among them."""
        values = values.astype(np.float64)
        return cls.between(values, values, np.zeros(values.shape, dtype=bool))


def either(one: Expected, other: Expected) -> Expected:
    """What lies between the ends of both."""
    lo, hi = np.fmin(one.lo, other.lo), np.fmax(one.hi, other.hi)
    return Expected.between(lo, hi, one.unknown | other.unknown)


@dataclass(frozen=True)
class Deviation:
    """How kernels of a release are known to be wrong, which an entry of the ledger may name."""

    name: str
    #: What they do, as ``list`` and the docs say it.
    words: str
    #: Whose kernels, as torch names the types of devices.
    devices: tuple[str, ...]
    #: What each result is then, by name; nothing of a call, or a result, that it does not touch.
    expected: Callable[[OperatorCall], Mapping[str, Expected]]


@dataclass(frozen=True)
class Derived:
    """Results of a call that are made of its tensors and of what it returned."""

    #: Their names, which are the last of the operator's results.
    names: tuple[str, ...]
    #: A function of ``play/``, whose source scripts have: (the call's tensors, what it returned,
    #: its settings) -> these results by name, fp32.
    make: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Operator:
    """An operator of torch. What is here is all that the rules, the watch and the scripts know."""

    name: str
    #: What is checked of a model where its calls are: ``layer norms``.
    words: str
    #: The arguments of a kernel, by their names in its schema, or of a function, and its result ->
    #: the call, or of a kernel that takes lists that of each tensor, or why nobody judges that one;
    #: None where these arguments make it another operator's. Raises ValueError with the reason
    #: where nobody judges such a call.
    read: Callable[[Mapping[str, Any], Any], Read | Sequence[Read | str] | None]
    #: What each result may be, by name. Raises ValueError with the reason where nothing is known.
    expected: Callable[[OperatorCall], Mapping[str, Expected]]
    #: A call of it in Python, made of its tensors' names and ``str.format`` of its settings.
    expression: str
    #: A call of it in words: ``torch.sum over dim 0 of a bfloat16 tensor of
    #: [4096, 16]``.
    title: Callable[[OperatorCall], str]
    #: The kernels that are calls of it, as the dispatcher names them.
    kernels: tuple[str, ...] = ()
    #: The arguments that these overwrite. ``read`` gets them as they were, and as the result, by
    #: name, what they are afterwards.
    overwrites: tuple[str, ...] = ()
    #: Functions of torch that are calls of it, where torch composes them of several kernels:
    #: ``torch.nn.functional.rms_norm``.
    functions: tuple[str, ...] = ()
    #: Functions of a library that are calls of it, by module and name: ``torchao.some:function``.
    library: tuple[str, ...] = ()
    #: Of a function: tensors whose gradients are results of the same call, and these results. The
    #: gradient that comes in is its tensor ``grad_output``.
    gradients: Mapping[str, str] = field(default_factory=dict)
    #: What the expression gives: the one result, or a tuple of these; derived ones come last.
    results: tuple[str, ...] = ("output",)
    #: Result -> results of the same call that its expected value is made of: where one of these is
    #: wrong, nothing is known of it.
    made_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Further results, which no kernel returns.
    derived: Derived | None = None
    #: Tensors that a call may be without; the expression takes None for them.
    optional: tuple[str, ...] = ()
    #: Tensors that only say what the call found; the expression does without.
    found: tuple[str, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    #: May another run of this very call return other bits, since its kernel adds up in no fixed
    #: order, as torch documents?
    unordered: Callable[[OperatorCall], bool] = lambda call: False
    #: A function that compiles itself, which it does only out of a watch's sight.
    compiles: bool = False
    #: Do linears call it, too? What they multiply is judged layer by layer.
    of_linears: bool = False
    #: A function of ``play/`` that the expression calls, which scripts have the source of.
    helper: str = ""

    @property
    def returned(self) -> tuple[str, ...]:
        """The results that a call itself gives."""
        made = () if self.derived is None else self.derived.names
        return tuple(name for name in self.results if name not in made)

    def role(self, result: str) -> str:
        """What verdicts on that result are about."""
        return f"{self.name}.{result}" if len(self.results) > 1 else self.name
