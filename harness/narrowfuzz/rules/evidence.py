"""The evidence that rules judge: a case, its reference and the traces of its arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np

from narrowfuzz.case import arm as arms
from narrowfuzz.case.events import Settings
from narrowfuzz.case.ladder import BY_NAME, base_of
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.accumulator import CPU, Accumulators
from narrowfuzz.numerics.delayed import Policy
from narrowfuzz.numerics.formats import F32, F64, CastRounding, Format, decode, rounded_from
from narrowfuzz.numerics.plan import Plan, Role, unquantised
from narrowfuzz.numerics.reference import Quantised
from narrowfuzz.numerics.scales import Scale
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.operators.linear import Reference, single_reference
from narrowfuzz.rules.datum import Datum
from narrowfuzz.trace.expect import Given
from narrowfuzz.trace.trace import Change, LayerCall, RunError, Seen, Trace

T = TypeVar("T")

#: Runs the eager arm again on other tensors, possibly of another Spec, possibly after an event of
#: a relation ("" for none).
Rerun = Callable[[dict[str, F32], Spec, str], Trace]


#: The eager arms that recompute nothing: on oneDNN's kernels, and on PyTorch's own.
EAGER, NATIVE = arms.EAGER.name, arms.EAGER_NATIVE.name
#: Why two runs of the same case may differ.
BY_CHANCE = "rounded stochastically, or added up in no fixed order"


@dataclass(frozen=True)
class OwnLayers:
    """Further evidence about a library's own layers, which keep a state between events."""

    kind: Literal["delayed", "current", "block", "mx", "nvfp4"]
    policy: Callable[[Settings], Policy | None]
    #: Modules of the library that resize windows of maxima.
    resizing: frozenset[str] = frozenset()
    #: Of casts in a backward.
    gradient_rounding: CastRounding = "nearest"
    #: Runs the most expensive arm again, after all others and without clearing any state; None: not
    #: done for this case.
    after_others: Callable[[], Trace] | None = None
    #: ``alone`` runs one rank of an arm by itself, in one process; ``run`` runs another Spec in
    #: eager, without a checkpoint.
    alone: Callable[[str, int], Trace] | None = None
    run: Callable[[Spec], Trace] | None = None


@dataclass(frozen=True)
class Evidence:
    """Everything about one judged case. Traces are by arm name, in ladder order; for a converted
    model on ranks the first is the run of all pieces in one process."""

    case: Case
    traces: Mapping[str, Trace]
    #: As-built deviation that is switched on -> the known issue that documents it.
    deviations: Mapping[str, str] = field(default_factory=dict)
    #: The rule by which the recipe may refuse this Spec, "" if it promises to run.
    refusal: str = ""
    #: Why the model must raise an error, according to documentation; "" if it need not.
    forbidden: str = ""
    #: The recipe's plan of a single linear, and the tensors that the linear or the model gets; both
    #: are unset for a library's own layers.
    plan: Plan = field(default_factory=lambda: unquantised("fp32"))
    tensors: dict[str, F32] = field(default_factory=dict)
    #: Second runs of the same arm on the same case, untapped.
    repeats: Mapping[str, Trace] = field(default_factory=dict)
    #: Arms that may omit inner roundings.
    elides: frozenset[str] = frozenset()
    #: True: an arm failed, so more expensive arms and other data would fail, too.
    stopped: bool = False
    #: Set for a library's own layers; None: a recipe converts a model.
    library: OwnLayers | None = None
    rerun: Rerun | None = None
    #: A reference that was already computed for this plan and these tensors; None: there is none.
    prepared: Reference | None = None
    #: Number that selects, modulo their count, which calls or peers are judged; None: all of them.
    focus: int | None = None
    #: Runs the float64 twin, the same model in float64; None if there is none, for example because
    #: it would draw other random numbers.
    twin: Callable[[], dict[str, F64]] | None = None
    #: ``converted_plan_of``: the plan of a converted linear with this Spec. ``plan_for_spec``: the
    #: plan of a single linear with another Spec, which conversion may leave unconverted.
    converted_plan_of: Callable[[Spec], Plan] | None = None
    plan_for_spec: Callable[[Spec], Plan] | None = None
    #: Second name of a tied parameter -> its first name.
    tied: Mapping[str, str] = field(default_factory=dict)
    #: How the device accumulates products.
    accumulators: Accumulators = field(default_factory=lambda: CPU)
    #: Dotted names of the linears that conversion was given; empty if a bare function is tested.
    layers: tuple[str, ...] = ("proj",)
    #: Names of the gradients that a backward must produce.
    gradients: frozenset[str] = frozenset()
    #: Missing gradients -> those of them that may be missing; None: all ``gradients`` must exist.
    may_be_missing: Callable[[frozenset[str]], frozenset[str]] | None = None
    #: For a user's model: the gradients that it does not get on an arm, unconverted.
    lacking: Callable[[str], frozenset[str]] | None = None
    #: Does the library promise that a row has the same bits in any batch?
    batch_invariant: bool = False
    #: The error of a user's unconverted model on an arm; None if the model is not a user's.
    unconverted_error: Callable[[str], RunError | None] | None = None
    #: A change of the census -> the same without lost attributes that nothing reads, None if no
    #: change remains; None: it is not known which attributes are read.
    drop_unread_attributes: Callable[[Change], Change | None] | None = None
    #: True: the model has only linears and pointwise operations.
    pointwise: bool = True
    #: The linear that makes the model's output, used once and for nothing else; "" if none does.
    output_linear: str = ""
    #: Parts of the model that a checkpoint recomputes one by one; empty: the model is one part.
    regions: tuple[str, ...] = ()
    #: Other recipes that run this Spec with power-of-two scales -> the Spec of each, and its plan.
    peers: Callable[[], dict[str, tuple[Spec, Plan]]] = dict
    #: Result of a model's layer -> checksums of the tensors that it depends on.
    given: Callable[[str], tuple[Given, ...]] = lambda role: ()
    #: Arms whose generated code may approximate divisions.
    approximate: frozenset[str] = frozenset()
    #: Arm that did not run as its name states -> why; it has no trace.
    unusable_because: Mapping[str, str] = field(default_factory=dict)
    #: Data that only one rule reads -> the function that computes it.
    data: Mapping[Datum[Any], Callable[[], Any]] = field(default_factory=dict)
    #: True for a single linear that conversion leaves unconverted.
    unconverted: bool = False
    #: On ranks: name of a linear that tensor-parallel ranks share -> colwise or rowwise.
    styles: Mapping[str, str] = field(default_factory=dict)
    #: On ranks: ``unconverted_run`` runs the unconverted model on ranks, ``unconverted_alone`` in
    #: one process, and ``laid_out`` the case on another layout. None in one process.
    unconverted_run: Callable[[], Trace] | None = None
    unconverted_alone: Callable[[], Trace] | None = None
    laid_out: Callable[[Sharding], Trace] | None = None

    def datum(self, of: Datum[T]) -> T | None:
        """Data that only one rule reads; None if the case has none."""
        made: Callable[[], T] | None = self.data.get(of)
        return None if made is None else made()

    @property
    def own_layers(self) -> OwnLayers:
        """``library``, for the rules that judge only a library's own layers."""
        assert self.library is not None
        return self.library

    @property
    def on_ranks(self) -> dict[str, Trace]:
        """The traces of arms that run on ranks."""
        return {arm: trace for arm, trace in self.traces.items() if BY_NAME[arm].sharded}

    @property
    def in_one_process(self) -> dict[str, Trace]:
        """The traces of arms that run in one process."""
        return {arm: trace for arm, trace in self.traces.items() if not BY_NAME[arm].sharded}

    @property
    def ran(self) -> bool:
        """True if the cheapest arm finished and no failure stopped the others."""
        cheapest = next(iter(self.traces.values()), None)
        return cheapest is not None and cheapest.error is None and not self.stopped

    @property
    def base(self) -> str:
        """The arm with which other arms, and runs on other data, are compared."""
        return base_of(self.spec).name

    @property
    def plain(self) -> dict[str, Trace]:
        """The eager runs that recomputed nothing and finished."""
        found = {arm: self.traces.get(arm) for arm in (EAGER, NATIVE)}
        return {arm: run for arm, run in found.items() if run is not None and run.error is None}

    @cached_property
    def reference(self) -> Reference:
        """The executed plan of this case: ``prepared`` if it fits, else computed for this case."""
        made = self.prepared
        if made is not None and made.of(self.plan, self.tensors):
            return made
        return single_reference(self.plan, self.spec.dtype, self.tensors)

    @cached_property
    def _rounded_from(self) -> dict[tuple[int, str], tuple[F32, tuple[F64, F64] | None]]:
        return {}

    def rounded_from(self, got: F32, fmt: Format) -> tuple[F64, F64] | None:
        """The least and the largest number that round to each element of a result; None if an
        element is no value of the format. Cached, since several rules need it of the same result.
        """
        key = id(got), fmt.name
        if key not in self._rounded_from:  # the cache keeps the result alive, so its id is unique
            self._rounded_from[key] = got, rounded_from(got, fmt)
        return self._rounded_from[key][1]

    @cached_property
    def exact(self) -> dict[str, F64]:
        """The results of the float64 twin."""
        assert self.twin is not None
        return self.twin()

    def not_strict(self, arm: str) -> str:
        """Why this arm may give other bits than eager, or "" if it must give the same."""
        arm_options = BY_NAME[arm]
        if self.twin is None:
            return "random numbers are drawn in another order"
        if self.spec.narrowed:
            return "eager autocast caches the cast of a leaf, a graph casts at each use"
        if self.spec.grad_layout != "contiguous":
            return "a graph takes its output gradients contiguous, and sums follow strides"
        if self.spec.sums_forwards:
            return "a graph adds up the gradients of each forward first"
        if arm in self.approximate:
            return "its code divides by approximation"
        if arm_options.reorders and not self.pointwise:
            return "a float sum may be re-ordered"
        if arm_options.fuses == "chains":
            return "default Inductor keeps fused chains unrounded"
        if arm_options.fuses == "bias" and self.spec.bias:
            return "mm and bias become one addmm"
        return ""

    def promised(self, other: Spec) -> Plan:
        """The plan of another Spec; conversion may leave a linear of other sizes unconverted."""
        return self.plan if self.plan_for_spec is None else self.plan_for_spec(other)

    def not_converted(self, arm: str, layer: str) -> bool:
        """True for a linear that conversion was given and did not convert."""
        census = self.traces[arm].census
        return census is not None and bool(self.layers) and layer not in census.converted

    @property
    def tap_failure(self) -> str | None:
        """Why the eager run's tap saw nothing of what the plan quantises; "" if it saw some of it,
        None if there was nothing to see."""
        trace = self.traces.get(self.base)
        if trace is None or trace.error is not None or not self.plan.quantised:
            return None
        seen: list[Trace | LayerCall] = [trace]
        seen += [call for call in trace.calls if not self.not_converted(self.base, call.module)]
        if any(one.sites for one in seen):
            return ""
        return next((one.unobserved for one in seen if one.unobserved), None)

    def backward_of(self, role: Role) -> bool:
        """False for a gradient if there was no backward."""
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
        """True for arms that compute the same as eager by other code."""
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
                return decoded * reference.broadcast_granules(seen.scale, operand.plan).astype(
                    np.float64
                )
        scale = self.seen_scale(role, side, seen)
        if scale is None:
            return None
        planned = operand.quantised
        assert planned is not None
        if identical(seen.codes, planned.codes) and identical(scale, planned.scale):
            return self.reference.values(role, side)
        return reference.multiplied(reference.values(seen.codes, scale, operand.plan), gemm, dtype)

    def seen_scale(self, role: Role, side: str, seen: Seen) -> Scale | None:
        """The scale s with which the codes were made, or None where it cannot be known.

        If the kernel gets the inverse of s, s is known if that inverse agrees with the reference's
        or is a power of two. A kernel that runs on unit scales shows no scale: then s is the
        plan's, unless a known deviation of the library leaves two candidates.
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
    """True for the same bytes, dtype and shape: then no element needs to be compared."""
    return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())


def same_bits(x: Any, y: Any) -> Any:
    """Elementwise equality with NaN equal to NaN and -0 equal to +0; of records, in every field."""
    if getattr(x, "dtype", None) is not None and x.dtype.names:
        return np.logical_and.reduce([same_bits(x[field], y[field]) for field in x.dtype.names])
    with np.errstate(invalid="ignore"):
        return (x == y) | (np.isnan(x) & np.isnan(y))
