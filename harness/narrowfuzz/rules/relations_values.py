"""Relations of values of a linear: transform a tensor, run eager again, and know how the result
must change.

R1-R4, R12, R14 and R15 rerun the eager arm; R13 only sorts what was observed. Outside of its
precondition a relation is skipped as not applicable, never loosened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from narrowfuzz.case.data import hash_bits
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import F32, FORMATS, Format, decode, round_to
from narrowfuzz.numerics.plan import ROLES, OperandPlan, Role
from narrowfuzz.operators.linear import single_reference
from narrowfuzz.rules.evidence import BY_CHANCE, Evidence
from narrowfuzz.rules.rerun import again, base_of, compare
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Ordered, bits
from narrowfuzz.trace.verdict import OtherRun, Verdict

#: Tensor -> role -> p: scaling the tensor by 2^k must scale the role's result by 2^(k p).
SCALES: dict[str, dict[Role, int]] = {
    "input": {"output": 1, "grad_input": 0, "grad_weight": 1},
    "grad_output": {"output": 0, "grad_input": 1, "grad_weight": 1},
    "weight": {"output": 1, "grad_input": 1, "grad_weight": 0},
}
SCALED_BY = {"input": "R1", "grad_output": "R2", "weight": "R3"}


def check_scaling(evidence: Evidence, tensor: str) -> Iterator[Verdict]:
    """R1-R3: tensor * 2^k multiplies the results it enters by exactly 2^k; codes do not change."""
    name = SCALED_BY[tensor]
    k = scaling_exponent(evidence.case.data.choice)
    base = base_of(evidence)
    with np.errstate(over="ignore"):
        scaled = {**evidence.tensors, tensor: np.ldexp(evidence.tensors[tensor], k)}
    if base is None or not _scaling_is_exact(evidence, scaled, tensor):
        yield plain(name, evidence.base, "output", "not_applicable", "scaling would not be exact")
        return
    other = OtherRun(f"{tensor} times {2.0**k:g}", evidence.spec, scaled)
    after = again(evidence, other)
    if after is None:
        yield plain(name, evidence.base, "output", "inconclusive", "the rerun failed")
        return
    for role in ROLES:
        if role == "output" and "bias" in evidence.tensors and tensor != "grad_output":
            continue  # the bias does not scale
        if evidence.by_chance(role):
            yield plain(name, evidence.base, role, "not_applicable", BY_CHANCE)
            continue
        by = k * SCALES[tensor][role]
        # unwritten memory may hold a signalling NaN, and numbers of any size
        with np.errstate(over="ignore", invalid="ignore"):
            want = np.ldexp(base.outputs[role], by)
        if by and not _rounds_alike(base.outputs[role], want, FORMATS[evidence.spec.dtype]):
            why = "results leave their type's range"
            yield plain(name, evidence.base, role, "not_applicable", why)
            continue
        got = after.outputs[role]
        yield compare(evidence, name, role, got, want, "does not scale", other, times=2.0**by)


def scaling_exponent(seed: int) -> int:
    """The k of R1-R3 for a seed."""
    return (1, -1, 3, -4)[seed % 4]


def _rounds_alike(before: F32, after: F32, fmt: Format) -> bool:
    """True if all results are rounded relatively, before they are scaled and after. In a format of
    narrow range a zero may have underflowed, and the least normal number may have been rounded up.
    """
    if fmt.min_normal < 2.0**-60:
        return True  # operands are above 2^-30: no sum of their products is a subnormal number
    both = np.abs(np.stack([before, after]))
    return bool(((both > fmt.min_normal) & (both <= fmt.max)).all())


def _scaling_is_exact(evidence: Evidence, scaled: dict[str, F32], tensor: str) -> bool:
    """True if the plan gives the same codes before and after, and no number is near the ends of
    its range."""
    fmt = FORMATS[evidence.spec.dtype]
    x = scaled[tensor]
    if not all(np.isfinite(t).all() for t in scaled.values()):
        return False
    if not np.array_equal(round_to(x, fmt, overflow="ieee"), x):
        return False
    for t in (evidence.tensors[tensor], x, *evidence.tensors.values()):
        magnitude = np.abs(t[t != 0])
        if magnitude.size and not (magnitude.min() > 2.0**-30 and magnitude.max() < 2.0**30):
            return False
    return _same_codes(evidence, scaled)


def _same_codes(evidence: Evidence, tensors: dict[str, F32]) -> bool:
    other = single_reference(evidence.plan, evidence.spec.dtype, tensors)
    for role in ROLES:
        for side in ("a", "b"):
            before = evidence.reference.operand(role, side).quantised
            after = other.operand(role, side).quantised
            if before is None or after is None:
                continue
            if not np.array_equal(before.codes, after.codes):
                return False
            if before.scale.dtype == np.uint8 and not _byte_inside(before.scale, after.scale):
                return False
    return True


def _byte_inside(*scales: Any) -> bool:
    return all(s.size == 0 or (s.min() >= 1 and s.max() <= 253) for s in scales)


def check_negation(evidence: Evidence) -> Iterator[Verdict]:
    """R4: negating the input negates output and grad_weight and does not change grad_input."""
    base = base_of(evidence)
    if base is None:
        yield plain("R4", evidence.base, "output", "not_applicable", "eager failed")
        return
    tensors = {**evidence.tensors, "input": -evidence.tensors["input"]}
    other = OtherRun("the negated input", evidence.spec, tensors)
    after = again(evidence, other)
    if after is None:
        yield plain("R4", evidence.base, "output", "inconclusive", "the rerun failed")
        return
    for role, sign in (("output", -1), ("grad_input", 1), ("grad_weight", -1)):
        if role == "output" and "bias" in evidence.tensors:
            continue
        if evidence.by_chance(role):
            yield plain("R4", evidence.base, role, "not_applicable", BY_CHANCE)
            continue
        got, want = after.outputs[role], sign * base.outputs[role]
        yield compare(evidence, "R4", role, got, want, "is not symmetric", other, times=sign)


def check_requantise(evidence: Evidence) -> Iterator[Verdict]:
    """R12: quantising dequantised values again changes none of them (power-of-two scales)."""
    base, operand = base_of(evidence), evidence.reference.operand("output", "a")
    site = base.at("output", "forward") if base else None
    if site is None or not operand.plan.power_of_two:
        yield plain(
            "R12", evidence.base, "output", "not_applicable", "scales are not powers of two"
        )
        return
    values = evidence.seen_values("output", "a", site.a)
    assert values is not None
    usual = (values == 0) | ((np.abs(values) > 2.0**-30) & (np.abs(values) < 2.0**100))
    usual &= round_to(values, FORMATS[evidence.spec.dtype], overflow="ieee") == values
    scale = site.a.scale
    assert scale is not None
    if not usual.all() or (scale.dtype == np.uint8 and not _byte_inside(scale)):
        yield plain(
            "R12", evidence.base, "output", "not_applicable", "values near the range's ends"
        )
        return
    tensors = {**evidence.tensors, "input": values.astype(np.float32)}
    other = OtherRun("its own values quantised again", evidence.spec, tensors)
    after = again(evidence, other)
    seen = after.at("output", "forward") if after else None
    if seen is None:
        yield plain("R12", evidence.base, "output", "inconclusive", "the rerun showed no operands")
        return
    requantised = evidence.seen_values("output", "a", seen.a)
    assert requantised is not None
    symptom, at = "requantises to another value", At(what="values", side="a")
    yield compare(evidence, "R12", "output", requantised, values, symptom, other, at)


def check_monotone(evidence: Evidence) -> Iterator[Verdict]:
    """R13: inside a granule a larger x never gets a smaller code."""
    base = base_of(evidence)
    for role in ROLES:
        site = base.main_site(role) if base else None
        if site is None:
            yield plain("R13", evidence.base, role, "not_applicable")
            continue
        for side, seen in (("a", site.a), ("b", site.b)):
            operand = evidence.reference.operand(role, side)
            plan = operand.plan
            if seen.codes is None or plan.format is None:
                continue
            if plan.rounding == "stochastic" or plan.hadamard:
                yield plain(
                    "R13", evidence.base, role, "not_applicable", "x is not what is rounded"
                )
                continue
            decoded = decode(seen.codes, plan.format)
            yield _monotone(evidence.base, role, side, operand.x, decoded, operand)


def _monotone(arm: str, role: Role, side: str, x: F32, decoded: Any, operand: Any) -> Verdict:
    plan = operand.plan
    shape, elements = x.shape, reference.by_granule(np.arange(x.size).reshape(x.shape), plan)
    x, decoded = reference.by_granule(x, plan), reference.by_granule(decoded, plan)
    ordinary = np.isfinite(x).all(axis=1)
    order = np.argsort(x[ordinary], axis=1, kind="stable")
    codes = np.take_along_axis(decoded[ordinary], order, axis=1)
    bad = codes[:, 1:] < codes[:, :-1]
    if not ordinary.any():
        return plain("R13", arm, role, "not_applicable", "every granule has an Inf or NaN")
    if x.shape[1] < 2:
        return plain("R13", arm, role, "not_applicable", "granules of one element")
    if not bad.any():
        return plain("R13", arm, role, "ok")
    row, col = first(bad)
    placed = np.take_along_axis(elements[ordinary], order, axis=1)[row, col : col + 2]
    before, after = (
        At(what="codes", name=role, side=side, index=tuple(map(int, np.unravel_index(i, shape))))  # type: ignore[arg-type]
        for i in placed
    )
    actual, expect = number(codes[row, col + 1]), Ordered(bits(codes[row, col]), before)
    return diverged("R13", arm, role, "is not monotone", after, actual, expect)


def check_below_amax(evidence: Evidence) -> Iterator[Verdict]:
    """R14: changing one element, still below amax, changes no other code."""
    base, operand = base_of(evidence), evidence.reference.operand("output", "a")
    site = base.at("output", "forward") if base else None
    moved = move_below_amax(operand.x, operand.plan, evidence.case.data.choice)
    if site is None or moved is None:
        yield plain("R14", evidence.base, "output", "not_applicable", "no element to move")
        return
    yield _codes_stay(evidence, "R14", site.a.codes, moved, moved == operand.x)


def move_below_amax(x: F32, plan: OperandPlan, seed: int) -> F32 | None:
    """``x`` with one element, which is below half of its granule's amax, set to minus half of its
    row's maximum, which is at most half of that amax; None if there is no such element."""
    if x.size < 2 or plan.format is None or not np.isfinite(x).all():
        return None
    limit = reference.broadcast_granules(reference.amax(x, plan), plan) * np.float32(0.5)
    row_limit = np.abs(x).max(axis=1, keepdims=True) * np.float32(0.5)
    small = (np.abs(x) < limit) & (row_limit <= limit) & (row_limit > 2.0**-100)
    if not small.any():
        return None
    choices = np.argwhere(small)
    row, col = choices[seed % len(choices)]
    moved = x.copy()
    moved[row, col] = -row_limit[row, 0]
    return moved


def check_locality(evidence: Evidence) -> Iterator[Verdict]:
    """R15: data outside a granule does not change its codes or scale (row and block granules)."""
    base, operand = base_of(evidence), evidence.reference.operand("output", "a")
    site = base.at("output", "forward") if base else None
    plan, x = operand.plan, operand.x
    one = plan.scale is None or plan.granularity == "tensor" or plan.scale.whole
    if site is None or one or x.shape[0] < 2:
        yield plain("R15", evidence.base, "output", "not_applicable", "one granule")
        return
    moved = replace_row(x, evidence.case.data.choice, evidence.spec.dtype)
    row = evidence.case.data.choice % x.shape[0]
    others = np.ones(x.shape, dtype=bool)
    others[row] = False
    yield _codes_stay(evidence, "R15", site.a.codes, moved, others)


def replace_row(x: F32, seed: int, dtype: str) -> F32:
    """``x`` with row ``seed mod rows`` replaced by values between -16 and 48."""
    noise = hash_bits(seed + 1, "input", 1, x.shape[1]).astype(np.float64)[0]
    moved = x.copy()
    moved[seed % x.shape[0]] = round_to(noise * 2.0**-58 - 16.0, FORMATS[dtype])
    return moved


def _codes_stay(evidence: Evidence, name: str, before: Any, moved: F32, mask: Any) -> Verdict:
    title = "an element below amax moved" if name == "R14" else "another row replaced"
    other = OtherRun(title, evidence.spec, {**evidence.tensors, "input": moved})
    after = again(evidence, other)
    site = after.at("output", "forward") if after else None
    if site is None or site.a.codes is None:
        return plain(name, evidence.base, "output", "inconclusive", "the rerun showed no operands")
    fmt = evidence.reference.operand("output", "a").plan.format
    assert fmt is not None
    got, want = decode(site.a.codes, fmt), decode(before, fmt)
    return compare(
        evidence,
        name,
        "output",
        np.where(mask, got, 0),
        np.where(mask, want, 0),
        "leaks between granules" if name == "R15" else "depends on elements below amax",
        other,
        At(what="codes", side="a"),
    )
