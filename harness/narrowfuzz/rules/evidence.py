"""What rules look at: the case, its reference and the arms' traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np

from narrowfuzz.case import arm as arms
from narrowfuzz.case.events import Settings
from narrowfuzz.case.ladder import BY_NAME, base_of
from narrowfuzz.case.spec import Case, Sharding, Spec
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.accumulator import CPU, Accumulators
from narrowfuzz.numerics.delayed import Policy
from narrowfuzz.numerics.formats import F32, F64, Format, decode, rounded_from
from narrowfuzz.numerics.plan import Plan, Role, unquantised
from narrowfuzz.numerics.reference import Quantised
from narrowfuzz.numerics.scales import Scale
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.operators.linear import Reference, alone
from narrowfuzz.rules.datum import Datum
from narrowfuzz.trace.expect import Given
from narrowfuzz.trace.trace import Change, LayerCall, RunError, Seen, Trace

T = TypeVar("T")

#: Runs the eager arm again on other tensors, possibly of another Spec, possibly after an event of
#: a relation ("" for none).
Rerun = Callable[[dict[str, F32], Spec, str], Trace]


#: The eager arms that recompute nothing: on oneDNN's kernels, and on PyTorch's own.
EAGER, NATIVE = arms.EAGER.name, arms.EAGER_NATIVE.name
#: Why two runs of the same need not be the same.
BY_CHANCE = "rounded by chance, or added up in no fixed order"


@dataclass(frozen=True)
class OwnLayers:
    """What there is besides of a library's own layers, which keep a state between events."""

    kind: Literal["delayed", "current", "mx"]
    policy: Callable[[Settings], Policy | None]
    #: Modules of the library that resize windows of maxima.
    resizing: frozenset[str] = frozenset()
    #: Runs the most expensive arm again, after all others and without clearing any state; None: not
    #: done for this case.
    after_others: Callable[[], Trace] | None = None
    #: What a rank leaves that runs alone on an arm of ranks, and the plain run of another Spec.
    alone: Callable[[str, int], Trace] | None = None
    run: Callable[[Spec], Trace] | None = None


@dataclass(frozen=True)
class Evidence:
    """Everything about one judged case. Traces are by arm name, in ladder order; of a converted
    model on ranks the first is of its pieces in one process."""

    case: Case
    traces: Mapping[str, Trace]
    #: As-built deviations switched on, each with the ledger entry that documents it.
    deviations: Mapping[str, str] = field(default_factory=dict)
    #: The rule by which the recipe may refuse this Spec, "" if it promises to run.
    refusal: str = ""
    #: Why the model must raise an error, as the documentation says; "" of others.
    forbidden: str = ""
    #: What a recipe does to a single linear, and what the linear or the model is given; of a
    #: library's own layers neither.
    plan: Plan = field(default_factory=lambda: unquantised("fp32"))
    tensors: dict[str, F32] = field(default_factory=dict)
    #: Second runs of the same arm on the same case, untapped.
    repeats: Mapping[str, Trace] = field(default_factory=dict)
    #: Arms whose inner roundings may be left out.
    elides: frozenset[str] = frozenset()
    #: True: an arm failed, and so would the dearer ones and other data.
    stopped: bool = False
    #: Of a library's own layers; None: a recipe converts a model.
    library: OwnLayers | None = None
    rerun: Rerun | None = None
    #: The reference of this very plan and these tensors, if somebody has one.
    prepared: Reference | None = None
    #: Which of several things is looked at, this many-th in turn; None: all of them.
    focus: int | None = None
    #: Runs the float64 twin; None where it would draw other random numbers.
    twin: Callable[[], dict[str, F64]] | None = None
    #: Plan of a layer that was converted, of another Spec of a single linear.
    plan_of: Callable[[Spec], Plan] | None = None
    plan_of_other: Callable[[Spec], Plan] | None = None
    #: Parameters that are another one under a second name -> its first name.
    tied: Mapping[str, str] = field(default_factory=dict)
    #: How the device adds what it multiplies.
    accumulators: Accumulators = field(default_factory=lambda: CPU)
    #: Dotted names of the linears that conversion was given; none where a function is under test.
    layers: tuple[str, ...] = ("proj",)
    #: Gradients a backward must leave.
    gradients: frozenset[str] = frozenset()
    #: Of gradients that are not there, those that need not be; None: all that are named must be.
    excused: Callable[[frozenset[str]], frozenset[str]] | None = None
    #: Does the library promise that a row has the same bits in any batch?
    batch_invariant: bool = False
    #: The error of a user's unconverted model on an arm; None where the model is no user's.
    unconverted_error: Callable[[str], RunError | None] | None = None
    #: A change of the census without the lost attributes that nobody reads, None if nothing is left
    #: of it; None: nobody can be asked.
    unread: Callable[[Change], Change | None] | None = None
    #: True: nothing but linears and pointwise operations.
    pointwise: bool = True
    #: The linear that makes the model's output, used once and by nothing else; "" if none does.
    last: str = ""
    #: Parts of the model that a checkpoint recomputes one by one; none: the model is one part.
    regions: tuple[str, ...] = ()
    #: Other recipes that run this Spec with power-of-two scales, and their plans.
    peers: Callable[[], dict[str, Plan]] = dict
    #: What a result of a model's layer rests on, by the result's name.
    given: Callable[[str], tuple[Given, ...]] = lambda role: ()
    #: Arms whose generated code may divide by approximation.
    approximate: frozenset[str] = frozenset()
    #: Arms that did not do what their name says, and why; they have no trace.
    void: Mapping[str, str] = field(default_factory=dict)
    #: How what one rule alone reads is come by, where there is any.
    data: Mapping[Datum[Any], Callable[[], Any]] = field(default_factory=dict)
    #: True of a single linear that conversion leaves alone.
    unconverted: bool = False
    #: Of a case on ranks: how linears are shared, by name, colwise or rowwise.
    styles: Mapping[str, str] = field(default_factory=dict)
    #: Runs the model on the ranks that no recipe has converted; runs the case on ranks that are
    #: laid out otherwise. None in one process.
    unconverted_run: Callable[[], Trace] | None = None
    laid_out: Callable[[Sharding], Trace] | None = None

    def datum(self, of: Datum[T]) -> T | None:
        """What one rule alone reads; None where there is nothing of the kind."""
        made: Callable[[], T] | None = self.data.get(of)
        return None if made is None else made()

    @property
    def own(self) -> OwnLayers:
        """Of a library's own layers, which the rules of these alone ask for."""
        assert self.library is not None
        return self.library

    @property
    def on_ranks(self) -> dict[str, Trace]:
        """The traces of arms that run on ranks."""
        return {arm: trace for arm, trace in self.traces.items() if BY_NAME[arm].sharded}

    @property
    def in_one_process(self) -> dict[str, Trace]:
        """Those of all others."""
        return {arm: trace for arm, trace in self.traces.items() if not BY_NAME[arm].sharded}

    @property
    def ran(self) -> bool:
        """True if the cheapest arm came to its end, and nothing stopped the others."""
        cheapest = next(iter(self.traces.values()), None)
        return cheapest is not None and cheapest.error is None and not self.stopped

    @property
    def base(self) -> str:
        """The arm that others, and runs on other data, are compared with."""
        return base_of(self.spec).name

    @property
    def plain(self) -> dict[str, Trace]:
        """The eager runs that recomputed nothing and came to their end."""
        found = {arm: self.traces.get(arm) for arm in (EAGER, NATIVE)}
        return {arm: run for arm, run in found.items() if run is not None and run.error is None}

    @cached_property
    def reference(self) -> Reference:
        """The plan of this case, executed: alone, unless that was prepared for several draws."""
        made = self.prepared
        if made is not None and made.of(self.plan, self.tensors):
            return made
        return alone(self.plan, self.spec.dtype, self.tensors)

    @cached_property
    def _rounded_from(self) -> dict[tuple[int, str], tuple[F32, tuple[F64, F64] | None]]:
        return {}

    def rounded_from(self, got: F32, fmt: Format) -> tuple[F64, F64] | None:
        """What rounds to a result; None where it is no value of the format. Several rules ask it of
        the same."""
        key = id(got), fmt.name
        if key not in self._rounded_from:  # the result stays alive, and so its id its own
            self._rounded_from[key] = got, rounded_from(got, fmt)
        return self._rounded_from[key][1]

    @cached_property
    def exact(self) -> dict[str, F64]:
        """The twin's results."""
        assert self.twin is not None
        return self.twin()

    def not_strict(self, arm: str) -> str:
        """Why this arm need not leave eager's bits, or "" if it must."""
        asked = BY_NAME[arm]
        if self.twin is None:
            return "random numbers are drawn in another order"
        if self.spec.narrowed:
            return "eager autocast casts a leaf once and keeps it, a graph casts at each use"
        if self.spec.grad_layout != "contiguous":
            return "a graph takes its output gradients contiguous, and sums follow strides"
        if self.spec.sums_forwards:
            return "a graph adds up the gradients of each forward first"
        if arm in self.approximate:
            return "its code divides by approximation"
        if asked.reorders and not self.pointwise:
            return "a float sum may be re-ordered"
        if asked.fuses == "chains":
            return "default Inductor keeps fused chains unrounded"
        if asked.fuses == "bias" and self.spec.bias:
            return "mm and bias become one addmm"
        return ""

    def promised(self, other: Spec) -> Plan:
        """The plan of another Spec: conversion may leave a linear of other sizes alone."""
        return self.plan if self.plan_of_other is None else self.plan_of_other(other)

    def left_alone(self, arm: str, layer: str) -> bool:
        """True for a linear that conversion was given and did not convert."""
        census = self.traces[arm].census
        return census is not None and bool(self.layers) and layer not in census.converted

    @property
    def unseen(self) -> str | None:
        """Why the eager run's tap saw nothing of what the plan quantises; "" if it saw some of it,
        None if there was nothing to see."""
        trace = self.traces.get(self.base)
        if trace is None or trace.error is not None or not self.plan.quantised:
            return None
        seen: list[Trace | LayerCall] = [trace]
        seen += [call for call in trace.calls if not self.left_alone(self.base, call.module)]
        if any(one.sites for one in seen):
            return ""
        return next((one.unobserved for one in seen if one.unobserved), None)

    def backward_of(self, role: Role) -> bool:
        """False for gradients where there was no backward."""
        return role == "output" or self.spec.trains

    @property
    def spec(self) -> Spec:
        return self.case.spec

    def by_chance(self, role: str) -> bool:
        """True where a second run may differ: an operand of this GEMM is rounded stochastically, or
        a kernel that was called adds up in no fixed order."""
        plan = any(name == role and gemm.stochastic for name, gemm in self.plan.gemms.items())
        return plan or self._unordered

    @cached_property
    def _unordered(self) -> bool:
        calls = (call for trace in self.traces.values() for call in trace.operators)
        return any(OPERATORS[call.operator].unordered(call) for call in calls)

    def compiled(self, arm: str) -> bool:
        return BY_NAME[arm].compiled

    def native(self, arm: str) -> bool:
        """True for arms on which PyTorch's own kernels multiply."""
        return BY_NAME[arm].native

    def compared(self, arm: str) -> bool:
        """True for arms that do eager's work by other code."""
        return self.compiled(arm) or (self.native(arm) and self.base == EAGER)

    def seen_values(self, role: Role, side: str, seen: Seen) -> F64 | None:
        """The operand that was really multiplied, or None where that is not observable."""
        operand = self.reference.operand(role, side)
        gemm, dtype = self.plan.gemms[role], self.spec.dtype
        if operand.plan.format is None:
            return operand.x.astype(np.float64)
        if seen.values is not None:
            return seen.values.astype(np.float64)
        if seen.codes is None:
            return None
        if seen.scale is not None and seen.scale_is_inverse and not gemm.post_scale:
            decoded = decode(seen.codes, operand.plan.format)
            with np.errstate(all="ignore"):
                return decoded * reference.spread(seen.scale, operand.plan).astype(np.float64)
        scale = self.seen_scale(role, side, seen)
        if scale is None:
            return None
        planned = operand.quantised
        assert planned is not None
        if identical(seen.codes, planned.codes) and identical(scale, planned.scale):
            return self.reference.values(role, side)
        return reference.multiplied(reference.values(seen.codes, scale, operand.plan), gemm, dtype)

    def seen_scale(self, role: Role, side: str, seen: Seen) -> Scale | None:
        """The scale the codes were made with, or None where it cannot be known.

        A kernel that takes inverses fixes s where 1/s is exact or agrees with the reference's. One
        that runs on unit scales shows none: then s is the plan's, unless a known deviation of the
        library leaves two candidates.
        """
        quantised = self.reference.operand(role, side).quantised
        assert quantised is not None
        if seen.scale is not None and not seen.scale_is_inverse:
            return seen.scale
        planned = quantised.scale
        if self.scale_hidden(role, seen):
            return None if self._ambiguous(role, side, quantised) else planned
        assert seen.scale is not None
        with np.errstate(all="ignore"):
            inverse = np.float32(1.0) / planned
            if identical(inverse, seen.scale) or same_bits(inverse, seen.scale).all():
                return planned
            exact = (np.float32(1.0) / seen.scale).astype(np.float32)
            return exact if (np.frexp(seen.scale)[0] == 0.5).all() else None

    def _ambiguous(self, role: Role, side: str, quantised: Quantised) -> bool:
        plan = self.reference.operand(role, side).plan
        others = (reference.scale_as_built(quantised.amax, plan, d) for d in reference.DEVIATIONS)
        rule = quantised.scale
        return any(o is not None and not same_bits(o, rule).all() for o in others)

    def scale_hidden(self, role: Role, seen: Seen) -> bool:
        """True where the kernel runs on unit scales and rescales afterwards, out of sight."""
        return seen.scale is None or (self.plan.gemms[role].post_scale and seen.scale_is_inverse)


def identical(x: Any, y: Any) -> bool:
    """The same bytes in the same shape: then no element needs a look."""
    return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())


def same_bits(x: Any, y: Any) -> Any:
    """Elementwise equality with NaN equal to NaN and -0 equal to +0; of records, in every field."""
    if getattr(x, "dtype", None) is not None and x.dtype.names:
        return np.logical_and.reduce([same_bits(x[field], y[field]) for field in x.dtype.names])
    with np.errstate(invalid="ignore"):
        return (x == y) | (np.isnan(x) & np.isnan(y))
