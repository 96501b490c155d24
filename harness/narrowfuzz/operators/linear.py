"""The reference of a linear layer and its gradients under a recipe's plan: operands, products and
bounds against which rules check a run. It calls ``numerics/bounds.py`` for the bounds. Everything
is computed once, and only if it is used.

Draws of one Spec are computed together. Their operands have one shape and one plan, and for small
operands most of the cost is that of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from narrowfuzz.numerics import bounds, reference
from narrowfuzz.numerics.formats import F32, F64, FORMATS, FP32
from narrowfuzz.numerics.plan import OperandPlan, Plan, Role
from narrowfuzz.numerics.reference import Quantised

T = TypeVar("T")
Tensors = dict[str, F32]
#: The middle and the radius of an interval.
Interval = tuple[F64, F64]


@dataclass(frozen=True)
class Operand:
    """One canonical operand of one GEMM and its quantisation by the plan (None: high precision)."""

    x: F32
    plan: OperandPlan
    quantised: Quantised | None


class Draws:
    """The references of several draws of one Spec; each quantity is computed for all of them when
    it is first used."""

    def __init__(self, plan: Plan, dtype: str, tensors: Sequence[Tensors]) -> None:
        self.plan, self.dtype, self.tensors = plan, dtype, tensors
        self._made: dict[tuple[str, ...], Sequence[Any]] = {}

    def operands(self, role: Role, side: str) -> Sequence[Operand]:
        """The operand on ``side`` "a" or "b" of each draw."""
        return self._once(("operand", role, side), lambda: self._operands(role, side))

    def values(self, role: Role, side: str) -> Sequence[F64]:
        """The values of the operand as the plan multiplies them, for each draw."""
        return self._once(("values", role, side), lambda: list(self._stacked(role, side)))

    def gemms(self, role: Role) -> Sequence[Interval]:
        """A @ B^T of the plan's operands and the radius of bound 3.2, for each draw."""
        return self._once(("gemm", role), lambda: self._gemms(role))

    def layers(self, role: Role) -> Sequence[Interval]:
        """The unquantised product and the radius of bound 3.3, for each draw."""
        return self._once(("layer", role), lambda: self._layers(role))

    def risky(self, role: Role) -> Sequence[Any]:
        """Mask of the elements whose partial sums may overflow, for each draw."""
        return self._once(("risky", role), lambda: self._risks(role))

    def _once(self, key: tuple[str, ...], make: Callable[[], Sequence[T]]) -> Sequence[T]:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _operands(self, role: Role, side: str) -> Sequence[Operand]:
        gemm = self.plan.gemms[role]
        plan = gemm.a if side == "a" else gemm.b
        pairs = [reference.canonical_operands(role, tensors) for tensors in self.tensors]
        xs = [reference.transformed(pair[side == "b"], plan) for pair in pairs]
        if len(xs) == 1 or not by_rows(plan, xs[0]):
            return [Operand(x, plan, reference.quantise(x, plan)) for x in xs]
        every = reference.quantise(np.concatenate(xs), plan)
        assert every is not None
        parts = [_parted(part, len(xs)) for part in (every.amax, every.scale, every.codes)]
        values = _parted(every.values, len(xs))
        return [
            Operand(x, plan, Quantised(*some)) for x, *some in zip(xs, *parts, values, strict=True)
        ]

    def _stacked(self, role: Role, side: str) -> F64:
        """``values`` of all draws as one array."""
        (made,) = self._once(("stacked", role, side), lambda: [self._values(role, side)])
        return made

    def _values(self, role: Role, side: str) -> F64:
        operands, gemm = self.operands(role, side), self.plan.gemms[role]
        if operands[0].quantised is None:
            return np.stack([operand.x for operand in operands]).astype(np.float64)
        values = np.stack([o.quantised.values for o in operands if o.quantised is not None])
        return reference.multiplied(values, gemm, self.dtype)

    def _gemms(self, role: Role) -> Sequence[Interval]:
        gemm = self.plan.gemms[role]
        a, b = (self._stacked(role, side) for side in "ab")
        if gemm.accumulator.ieee:
            return list(zip(reference.product(a, b), bounds.gemm_radius(a, b, gemm), strict=True))
        radii = [bounds.gemm_radius(a[i], b[i], gemm, self.least(i, role)) for i in range(len(a))]
        return list(zip(reference.product(a, b), radii, strict=True))

    def _layers(self, role: Role) -> Sequence[Interval]:
        gemm = self.plan.gemms[role]
        if not gemm.quantised and gemm.accumulator.ieee:
            # only the accumulator errs; an infinite radius becomes NaN, since nothing is known
            # there
            with np.errstate(invalid="ignore"):
                return [(centre, radius + (radius - radius)) for centre, radius in self.gemms(role)]
        a, b = (np.stack([o.x for o in self.operands(role, side)]) for side in "ab")
        bound_a, bound_b = (self._bounds(role, side) for side in "ab")
        centres = reference.product(a.astype(np.float64), b.astype(np.float64))
        if gemm.accumulator.ieee:
            return list(
                zip(centres, bounds.layer_radius(a, b, bound_a, bound_b, gemm), strict=True)
            )
        radii = [
            bounds.layer_radius(a[i], b[i], bound_a[i], bound_b[i], gemm, self.least(i, role))
            for i in range(len(a))
        ]
        return list(zip(centres, radii, strict=True))

    def _bounds(self, role: Role, side: str) -> F64:
        """Bound 3.1 of every element; 0 if nothing is quantised."""
        operands = self.operands(role, side)
        first = operands[0]
        quantised = [o.quantised for o in operands if o.quantised is not None]
        if not quantised:
            return np.zeros((len(operands), *first.x.shape))
        if not by_rows(first.plan, first.x):
            return np.stack(
                [
                    bounds.quantise_bound(o.x, q.scale, o.plan)
                    for o, q in zip(operands, quantised, strict=True)
                ]
            )
        rows = np.concatenate([o.x for o in operands])
        scales = np.concatenate([q.scale for q in quantised])
        every = bounds.quantise_bound(rows, scales, first.plan)
        return every.reshape(len(operands), *first.x.shape)

    def least(self, i: int, role: Role) -> tuple[F64 | float, F64 | float]:
        """The smallest normal number of each row of both operands of draw ``i``, to which
        accumulators align; 0 for an IEEE accumulator, which does not align."""
        gemm = self.plan.gemms[role]
        if gemm.accumulator.ieee:
            return 0.0, 0.0
        return self._least(i, role, "a"), self._least(i, role, "b")

    def _least(self, i: int, role: Role, side: str) -> F64 | float:
        operand = self.operands(role, side)[i]
        if operand.quantised is None:
            return FORMATS[self.dtype].min_normal
        assert operand.plan.format is not None
        code = 1 << operand.plan.format.mantissa_bits
        codes = np.full(operand.x.shape, code, operand.quantised.codes.dtype)
        values = reference.values(codes, operand.quantised.scale, operand.plan)
        return np.asarray(np.max(values, axis=1, initial=0.0))

    def _risks(self, role: Role) -> Sequence[Any]:
        a, b = (np.abs(self._stacked(role, side)) for side in "ab")
        limit = FORMATS[self.dtype].max * 0.5
        with np.errstate(all="ignore"):
            most_a, most_b = (np.max(x, axis=(1, 2), initial=0.0) for x in (a, b))
            reach = np.maximum(most_a * most_b, np.maximum(most_a, most_b) * 2.0**16)
            none = a.shape[2] * reach < limit
        nowhere = np.zeros((a.shape[1], b.shape[1]), dtype=bool)
        nowhere.setflags(write=False)
        return [
            nowhere if none[i] else self._risky(i, role, a[i], b[i], limit) for i in range(len(a))
        ]

    def _risky(self, i: int, role: Role, a: F64, b: F64, limit: float) -> Any:
        gemm = self.plan.gemms[role]
        with np.errstate(all="ignore"):
            risky = ~(a @ b.T < limit)
            if gemm.b.format is not None and not gemm.dequantise_to:
                risky |= ~(a.sum(axis=1) * gemm.b.format.max < limit)[:, None]
            if gemm.a.format is not None and not gemm.dequantise_to:
                risky |= ~(b.sum(axis=1) * gemm.a.format.max < limit)[None, :]
            if gemm.multiplies(self.dtype).startswith("fp8") and not gemm.accumulator.ieee:
                risky |= self.rescale_overflows(i, role)  # cuBLAS multiplies both scales first
        return risky

    def rescale_overflows(self, i: int, role: Role) -> Any:
        """Elements whose factor 1/s_a * 1/s_b, computed in fp32 as one number, may be Inf."""
        factors = []
        for side in ("a", "b"):
            operand = self.operands(role, side)[i]
            assert operand.quantised is not None
            scale = operand.quantised.scale.astype(np.float64)
            if operand.plan.block:  # the smallest scale of a row, which gives the largest factor
                scale = reference.broadcast_granules(scale, operand.plan).min(axis=1)
            with np.errstate(all="ignore"):
                factors.append(1.0 / scale.reshape(-1, 1))
        # a factor 2 below the limit: the scale that was used may be half of the plan's
        return ~(factors[0] * factors[1].T < FP32.max * 0.5)


class Reference:
    """The reference of draw ``number``; ``single_reference`` makes that of a single case."""

    def __init__(self, draws: Draws, number: int = 0) -> None:
        self.draws, self.number, self.plan = draws, number, draws.plan

    def of(self, plan: Plan, tensors: Tensors) -> bool:
        """True if this is the reference of these same plan and tensors (by identity)."""
        return self.plan is plan and self.draws.tensors[self.number] is tensors

    def divides(self, role: Role, side: str) -> bool:
        """True if the operand's shape is a multiple of the plan's scaling blocks: the plan does not
        define what a block at the edge with fewer elements is."""
        gemm = self.plan.gemms[role]
        tensors = self.draws.tensors[self.number]
        x = reference.canonical_operands(role, tensors)[side == "b"]
        plan = gemm.a if side == "a" else gemm.b
        if plan.block and x.shape[1] % plan.block:
            return False
        return plan.granularity != "tile" or x.shape[0] % plan.block == 0

    def operand(self, role: Role, side: str) -> Operand:
        return self.draws.operands(role, side)[self.number]

    def values(self, role: Role, side: str) -> F64:
        """The values of the operand as the plan multiplies them."""
        return self.draws.values(role, side)[self.number]

    def centre(self, role: Role) -> F64:
        """A @ B^T of the plan's operands."""
        return self.gemm(role)[0]

    def gemm(self, role: Role) -> Interval:
        """A @ B^T of the plan's operands and the radius of bound 3.2."""
        return self.draws.gemms(role)[self.number]

    def layer(self, role: Role) -> Interval:
        """The unquantised product and the radius of bound 3.3."""
        return self.draws.layers(role)[self.number]

    def least(self, role: Role) -> tuple[F64 | float, F64 | float]:
        """The smallest normal number of each row of both operands, to which accumulators align; 0
        for an IEEE accumulator, which does not align."""
        return self.draws.least(self.number, role)

    def may_overflow(self, role: Role) -> Any:
        """Elements whose partial sums, or sums with only one scale applied, may leave the range of
        the layer's dtype.

        The order in which a kernel scales and adds is not fixed, so nothing is claimed of these.
        """
        return self.draws.risky(role)[self.number]

    def rescale_overflows(self, role: Role) -> Any:
        """Elements whose factor 1/s_a * 1/s_b, computed in fp32 as one number, may be Inf."""
        return self.draws.rescale_overflows(self.number, role)


def single_reference(plan: Plan, dtype: str, tensors: Tensors) -> Reference:
    """The reference of a single case."""
    return Reference(Draws(plan, dtype, [tensors]))


def by_rows(plan: OperandPlan, x: F32) -> bool:
    """True if several operands may be quantised as one, with their rows concatenated: no granule
    then has elements of two of them."""
    if plan.scale is None or plan.granularity == "tensor" or plan.scale.whole:
        return False
    return plan.granularity != "tile" or x.shape[0] % plan.block == 0


def _parted(rows: Any, parts: int) -> Any:
    return rows.reshape(parts, len(rows) // parts, *rows.shape[1:])
