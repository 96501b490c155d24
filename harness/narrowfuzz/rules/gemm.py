"""O5 and O15 (products of the observed operands), O6 (the layer's bound), O7 (the lattice)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics import bounds
from narrowfuzz.numerics.formats import BF16, F32, F64, FORMATS, Format, round_to
from narrowfuzz.numerics.plan import ROLES, Role
from narrowfuzz.numerics.reference import product
from narrowfuzz.operators.linear import Reference
from narrowfuzz.operators.operator import Expected
from narrowfuzz.operators.sum import summed
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.expected import NOTHING, beyond, outside, passed
from narrowfuzz.rules.rule import diverged, first, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import between, number
from narrowfuzz.trace.trace import Seen, Trace
from narrowfuzz.trace.verdict import Verdict

_UNSEEN = Seen()


def check_gemm_output(evidence: Evidence) -> Iterator[Verdict]:
    """O5: output lies in the interval that bound 3.2 allows for the observed operands."""
    yield from _check_gemm(evidence, "O5", ("output",))


def check_gemm_grads(evidence: Evidence) -> Iterator[Verdict]:
    """O15: grad_input and grad_weight obey bound 3.2 with their own plan."""
    yield from _check_gemm(evidence, "O15", ("grad_input", "grad_weight"))


def _check_gemm(evidence: Evidence, rule: str, roles: tuple[Role, ...]) -> Iterator[Verdict]:
    for arm, trace in evidence.traces.items():
        for role in roles:
            got = trace.outputs.get(role)
            if trace.error is not None or got is None:
                yield plain(rule, arm, role, "not_applicable")
                continue
            a, b = observed(evidence, trace, role)
            if a is None or b is None:
                why = trace.unobserved or "not tapped"
                yield plain(rule, arm, role, "inconclusive", why)
                continue
            centre, radius = centre_and_radius(evidence, role, a, b)
            # the observed operands may be larger than those of the plan, and overflow
            unknown = np.isnan(centre) | ~np.isfinite(radius)
            skip = evidence.reference.may_overflow(role) | unknown
            yield within(evidence, rule, arm, role, got, centre, radius, skip)


def observed(evidence: Evidence, trace: Trace, role: Role) -> tuple[F64 | None, F64 | None]:
    """Both operands as they were really multiplied; None for one that was not observed."""
    site = trace.main_site(role)
    if site is None and evidence.plan.gemms[role].quantised:
        return None, None
    seen = (_UNSEEN, _UNSEEN) if site is None else (site.a, site.b)
    return (
        evidence.seen_values(role, "a", seen[0]),
        evidence.seen_values(role, "b", seen[1]),
    )


def centre_and_radius(evidence: Evidence, role: Role, a: F64, b: F64) -> tuple[F64, F64]:
    """The product of the observed operands and the radius of bound 3.2."""
    planned = evidence.reference.values(role, "a"), evidence.reference.values(role, "b")
    if a is planned[0] and b is planned[1]:
        return evidence.reference.gemm(role)
    least = evidence.reference.least(role)
    return product(a, b), bounds.gemm_radius(a, b, evidence.plan.gemms[role], least)


def check_bias_gradient(evidence: Evidence) -> Iterator[Verdict]:
    """O16: the bias gradient is the sum of the output gradients, whatever else is quantised."""
    for arm, trace in evidence.traces.items():
        got, grad = trace.outputs.get("grad_bias"), evidence.tensors.get("grad_output")
        if trace.error is not None or got is None or grad is None:
            yield plain("O16", arm, "grad_bias", "not_applicable")
            continue
        may = summed(grad.astype(np.float64), (0,), FORMATS[evidence.spec.dtype])
        bad = outside(may, got)
        if not bad.any():
            yield passed("O16", arm, "grad_bias", may)
            continue
        if not (bad & ~_summed_codes(evidence, trace, got)).any():
            entry = evidence.deviations["bias_gradient_of_codes"]
            yield plain("O16", arm, "grad_bias", "ok").known(entry)
            continue
        at = first(bad)
        here = At(name="grad_bias", index=at)
        yield beyond("O16", arm, "grad_bias", _symptom(got, at), here, got, may)


def _summed_codes(evidence: Evidence, trace: Trace, got: F32) -> NDArray[np.bool_]:
    """True where a bias gradient is the sum of the quantised output gradients that a GEMM
    multiplied, rounded to the layer's dtype; False everywhere if the reference does not follow that
    deviation."""
    if "bias_gradient_of_codes" not in evidence.deviations:
        return np.zeros(got.shape, dtype=bool)
    may = sum_of_codes(evidence, trace)
    if may is None:
        return np.zeros(got.shape, dtype=bool)
    return bounds.contains(may.lo, may.hi, got) | may.unknown


def sum_of_codes(evidence: Evidence, trace: Trace) -> Expected | None:
    """The sum of the quantised output gradients that a GEMM multiplied, rounded to the layer's
    dtype; None if they were not observed."""
    multiplied = observed(evidence, trace, "grad_input")[0]
    if multiplied is None:
        multiplied = observed(evidence, trace, "grad_weight")[0]
        if multiplied is None:
            return None
        multiplied = multiplied.T
    fmt = FORMATS[evidence.spec.dtype]
    return summed(round_to(multiplied, fmt, overflow="ieee"), (0,), fmt)


def each_result(
    evidence: Evidence, rule: str, judge: Callable[[Evidence, str, Role, F32], Verdict]
) -> Iterator[Verdict]:
    """What ``judge`` says of every result of a linear whose operands are not transformed, or why it
    is not asked."""
    for arm, trace in evidence.traces.items():
        for role in ROLES:
            got = trace.outputs.get(role)
            if trace.error is not None or got is None:
                yield plain(rule, arm, role, "not_applicable")
            elif evidence.plan.gemms[role].transformed:
                yield plain(rule, arm, role, "not_applicable", "operands are transformed")
            else:
                yield judge(evidence, arm, role, got)


def check_layer(evidence: Evidence) -> Iterator[Verdict]:
    """O6: every result lies within bound 3.3 of the unquantised product."""
    return each_result(evidence, "O6", _judge_layer)


def _judge_layer(evidence: Evidence, arm: str, role: Role, got: F32) -> Verdict:
    centre, radius = evidence.reference.layer(role)
    skip = evidence.reference.may_overflow(role) | ~np.isfinite(centre) | np.isnan(radius)
    return within(evidence, "O6", arm, role, got, centre, radius, skip)


def check_lattice(evidence: Evidence) -> Iterator[Verdict]:
    """O7: where every partial sum is exact, every arm returns the one exact result."""
    for arm, trace in evidence.traces.items():
        for role in ROLES:
            got = trace.outputs.get(role)
            if trace.error is not None or got is None:
                yield plain("O7", arm, role, "not_applicable")
            elif not on_lattice(evidence, role):
                yield plain("O7", arm, role, "not_applicable", "sums are not exact")
            else:
                centre = evidence.reference.centre(role)
                nothing = np.zeros(centre.shape, dtype=bool)
                yield within(evidence, "O7", arm, role, got, centre, 0.0, nothing)


def on_lattice(
    evidence: Evidence, role: Role, *, work: Reference | None = None, addend: float = 0.0
) -> bool:
    """True if all partial sums are exact: operands are multiples of one unit and sums, ``addend``
    included, stay below as many units as the accumulator holds, 2^24 in fp32. Checked on the
    operands of ``work`` (the case's own reference by default), not assumed from the regime."""
    if evidence.case.data.regime != "lattice":
        return False
    work = work or evidence.reference
    unit = 1.0
    magnitudes = []
    for side in ("a", "b"):
        operand = work.operand(role, side)
        values = work.values(role, side)
        if operand.quantised is not None:
            if not np.array_equal(values, operand.x):
                return False
            scale = operand.quantised.scale
            if scale.dtype.names:  # two-level: g is a power of two only for amax = 21 * 2^k
                return False
            if scale.dtype == np.float32 and (np.frexp(scale)[0] != 0.5).any():
                return False
        magnitude = np.abs(values)
        if not np.isfinite(magnitude).all():
            return False
        unit *= _grid(magnitude)
        magnitudes.append(magnitude)
    exact = evidence.plan.gemms[role].accumulator.exact_below
    # the sum of magnitudes is computed only if its simple upper bound is too large
    most = [float(np.max(x, initial=0.0)) for x in magnitudes]
    reach = magnitudes[0].shape[1] * most[0] * most[1] + addend
    if not (reach < exact * unit and reach < 2.0**100):
        reach = float(np.max(magnitudes[0] @ magnitudes[1].T, initial=0.0)) + addend
    return reach < exact * unit and unit > 2.0**-100 and reach < 2.0**100


def _grid(magnitude: F64) -> float:
    """A power of two that divides every element: a sixteenth of the one at or below the largest
    element, 1 if all are zero. 0 if it does not divide them."""
    largest = float(np.max(magnitude, initial=0.0))
    if largest == 0.0:
        return 1.0
    unit = float(np.ldexp(1.0, int(np.frexp(largest)[1]) - 5))
    units = magnitude / unit
    return unit if (units == np.rint(units)).all() else 0.0


def within(
    evidence: Evidence,
    rule: str,
    arm: str,
    role: Role,
    got: F32,
    centre: F64,
    radius: F64 | float,
    skip: Any,
) -> Verdict:
    """Judges ``got`` by the interval around ``centre``, to which an output's bias is added.
    Elements in ``skip`` are not judged."""
    if got.size and skip.all():
        return plain(rule, arm, role, "inconclusive", "every element may overflow or is NaN")
    bias = evidence.tensors.get("bias") if role == "output" else None
    if _surely_within(evidence, arm, role, got, centre, radius, skip, bias):
        share = _used(got, centre, radius, skip, bias) if rule == "O6" else 0.0
        return _passed(rule, arm, role, share)
    lo, hi = interval(evidence, arm, role, centre, radius, bias)
    bad = ~(bounds.contains(lo, hi, got) | skip)
    if bias is not None:  # nothing is known of results with a NaN or Inf bias
        bad &= np.isfinite(bias)[None, :]
    if not bad.any():
        judged = ~skip if bias is None else ~skip & np.isfinite(bias)[None, :]
        if not (bounds.excludes_zero(lo, hi) & judged).any():
            return plain(rule, arm, role, "inconclusive", NOTHING)
        share = _used(got, centre, radius, skip, bias) if rule == "O6" else 0.0
        return _passed(rule, arm, role, share)
    entry, without = _ignores_bias(evidence) if bias is not None else "", False
    if bias is not None:
        ends = interval(evidence, arm, role, centre, radius, None)
        without = bool((bounds.contains(*ends, got) | skip).all())
        if entry:
            lo, hi = ends
        if entry and without:
            return plain(rule, arm, role, "ok").known(entry)
    excused = rescaled(evidence, role)
    if excused is not None and not (bad & ~excused).any():
        return plain(rule, arm, role, "ok").known(evidence.deviations["rescale_overflow"])
    at = first(bad)
    here, actual, expect = At(name=role, index=at), number(got[at]), between(lo[at], hi[at])
    factor = _factor(got[at], centre[at], radius, at, bias)
    remark = "the bias of this linear is ignored: output is wrong" if without else ""
    more = {"factor": factor, "remark": remark}
    return diverged(rule, arm, role, _symptom(got, at), here, actual, expect, **more)


def rescaled(evidence: Evidence, role: Role) -> Any:
    """True for elements that become Inf or NaN if both inverse scales are first multiplied into one
    factor; None if the reference does not follow that deviation."""
    if "rescale_overflow" in evidence.deviations and evidence.plan.gemms[role].post_scale:
        return evidence.reference.rescale_overflows(role)
    return None


def _passed(rule: str, arm: str, role: Role, share: float) -> Verdict:
    if not share:
        return plain(rule, arm, role, "ok")
    return Verdict(rule, arm, role, "ok", factor=share)


def _surely_within(
    evidence: Evidence,
    arm: str,
    role: Role,
    got: F32,
    centre: F64,
    radius: F64 | float,
    skip: Any,
    bias: F32 | None,
) -> bool:
    """True if a cheap test, which most results pass, shows that every result lies in its interval
    and that zeros would not. False means that it is not known.

    Instead of rounding both ends of every interval it compares these with the numbers that round to
    the result (``rounded_from``), which is equivalent if the ends are rounded once.
    """
    dtype, fmt = evidence.spec.dtype, _rounds_to(evidence, role, got, bias)
    ends = None if fmt is None or arm in evidence.elides else evidence.rounded_from(got, fmt)
    if fmt is None or ends is None:
        return False
    least, most = ends
    with np.errstate(all="ignore"):
        lo, hi = centre - radius, centre + radius
        if bias is None:
            inside = (lo <= most) & (hi >= least)
            if inside.all():
                return _tells((lo, hi), fmt.min_normal, ~skip)
            return bool((inside | skip).all()) and _tells((lo, hi), fmt.min_normal, ~skip)
        judged = ~skip & np.isfinite(bias)
        if dtype != "fp32":
            least, most = _through_fp32(least, 1.0), _through_fp32(most, -1.0)
        inside = ~judged
        if evidence.plan.bias == "either":
            # a kernel that adds the bias inside errs by more, never by less
            inside |= (lo + bias <= most) & (hi + bias >= least)
        if not inside.all():
            lo, hi = round_to(np.stack([lo, hi]), fmt, overflow="ieee")
            inside |= (lo + bias <= most) & (hi + bias >= least)
        # ends that hold however the bias is added: three radii, and some roundings on the way
        slack = 4.0 * radius + 2.0**-6 * (np.abs(centre) + np.abs(bias))
        total = centre + bias
        return bool(inside.all()) and _tells((total - slack, total + slack), fmt.min_normal, judged)


def _rounds_to(evidence: Evidence, role: Role, got: F32, bias: F32 | None) -> Format | None:
    """The format to which a GEMM's sum is rounded once; None if it is rounded more than once."""
    rounding, dtype = evidence.plan.gemms[role].rounding, evidence.spec.dtype
    if rounding == ("out",):
        return FORMATS[dtype]
    if rounding != ("bf16", "out") or dtype == "fp16" or bias is not None:
        return None
    # the rounding to bf16 has no subnormals; other numbers are not changed by the second rounding
    small = np.abs(got)
    return None if ((small > 0.0) & (small <= BF16.min_normal)).any() else BF16


def _through_fp32(end: F64, inwards: float) -> F64:
    """A safe end for numbers that are rounded to fp32 before they are compared: ``end`` itself if
    fp32 holds it, else moved inwards by more than that rounding moves a number."""
    with np.errstate(all="ignore"):
        moved = end + inwards * (np.abs(end) * 2.0**-23 + 2.0**-149)
        return np.where(end.astype(np.float32) == end, end, moved)


def _tells(ends: tuple[F64, F64], tiny: float, judged: Any) -> bool:
    """Is the sign of at least one judged result known?"""
    return bool((((ends[0] > tiny) | (ends[1] < -tiny)) & judged).any())


def _used(got: F32, centre: F64, radius: F64 | float, skip: Any, bias: F32 | None) -> float:
    """The largest error of a judged result, as a share of its radius; 0 if there is no radius."""
    if not isinstance(radius, np.ndarray) or not got.size:
        return 0.0
    with np.errstate(all="ignore"):
        share = np.abs(got - centre - (0.0 if bias is None else bias)) / radius
    return float(np.max(share, initial=0.0, where=~skip & np.isfinite(share)))


def _ignores_bias(evidence: Evidence) -> str:
    """The known issue by which the output may lack its bias, "" if there is none."""
    if "bias_ignored" in evidence.deviations:
        return evidence.deviations["bias_ignored"]
    return "" if evidence.spec.k else evidence.deviations.get("bias_ignored_if_empty", "")


def interval(
    evidence: Evidence, arm: str, role: Role, centre: F64, radius: F64 | float, bias: F32 | None
) -> tuple[F64, F64]:
    """Both ends of what the layer may return around ``centre``, however the bias is added."""
    gemm, dtype = evidence.plan.gemms[role], evidence.spec.dtype
    lo, hi = bounds.interval(
        centre, radius, gemm, dtype, bias=bias, may_elide=arm in evidence.elides
    )
    if bias is not None and evidence.plan.bias == "either":
        if isinstance(radius, np.ndarray):
            radius = bounds.fused_bias_radius(centre, radius, bias, evidence.spec.k)
        fused = bounds.interval(centre, radius, bounds.unrounded(gemm), dtype, bias=bias)
        lo, hi = np.minimum(lo, fused[0]), np.maximum(hi, fused[1])
    return lo, hi


def _factor(got: Any, centre: Any, radius: Any, at: tuple[int, ...], bias: F32 | None) -> float:
    allowed = float(radius[at]) if isinstance(radius, np.ndarray) else radius
    if not (allowed > 0 and np.isfinite(got)):
        return 0.0
    centre = float(centre) + (float(bias[at[1]]) if bias is not None else 0.0)
    return abs(float(got) - centre) / allowed


def _symptom(got: F32, at: tuple[int, ...]) -> str:
    if not np.isfinite(got[at]):
        return "not finite"
    return "wrong value"
