"""O2 cast-exact, O3 scale-exact, O4 amax-exact: the quantiser, part by part.

Each part is judged from the observed result of the part before, so that a wrong amax is not also
reported as a wrong scale, nor a wrong scale as wrong codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import canonical, decode
from narrowfuzz.numerics.plan import ROLES, MxScale, OperandPlan, Role, TwoLevelScale
from narrowfuzz.numerics.scales import Scale
from narrowfuzz.operators.linear import Operand
from narrowfuzz.rules.evidence import Evidence, identical
from narrowfuzz.rules.rule import diverged, first, number, plain, same_bits, unequal
from narrowfuzz.trace.address import At, What
from narrowfuzz.trace.expect import Given, Is, Within, between, bits
from narrowfuzz.trace.trace import Seen
from narrowfuzz.trace.verdict import Verdict

#: Symptom of a level-B operand (dequantised values), which cannot tell a wrong code from a wrong
#: scale.
LEVEL_B = "dequantised value"


def _each_operand(
    evidence: Evidence,
    rule: str,
    judge: Callable[[Evidence, str, Role, str, Seen, Operand], Verdict],
) -> Iterator[Verdict]:
    """What ``judge`` says of every observed quantised operand, or why there is none."""
    for arm, trace in evidence.traces.items():
        for role in ROLES:
            unused = trace.error is not None or not evidence.backward_of(role)
            if unused or not evidence.plan.gemms[role].quantised:
                yield plain(rule, arm, role, "not_applicable")
                continue
            site = trace.main_site(role)
            if site is None:
                yield plain(rule, arm, role, "inconclusive", trace.unobserved or "not tapped")
                continue
            for side, seen in (("a", site.a), ("b", site.b)):
                operand = evidence.reference.operand(role, side)
                if operand.plan.hadamard:
                    # summed in the kernel's order and rounded to bf16: not known to the last bit
                    why = "transformed before it is quantised"
                    yield plain(rule, arm, role, "inconclusive", why)
                    continue
                yield judge(evidence, arm, role, side, seen, operand)


def check_amax(evidence: Evidence) -> Iterator[Verdict]:
    """O4: amax equals max|x| of its granule; max is exact in any order, so on every arm."""
    return _each_operand(evidence, "O4", _judge_amax)


def _judge_amax(
    evidence: Evidence, arm: str, role: Role, side: str, seen: Seen, operand: Operand
) -> Verdict:
    if seen.amax is None:
        return plain("O4", arm, role, "not_applicable", "amax is not exposed")
    assert operand.quantised is not None
    expected = operand.quantised.amax
    same = identical(seen.amax, expected)
    if same or not (bad := ~same_bits(seen.amax, expected)).any():
        zeros = not np.any(expected)
        why = "zeros in every granule" if zeros else ""
        return plain("O4", arm, role, "inconclusive" if zeros else "ok", why)
    at = first(bad)
    place = _at("amax", role, side, at)
    return unequal("O4", arm, role, "amax", place, seen.amax[at], expected[at])


#: Relative tolerance of a scale after two divisions that each err by up to 2 units in the last
#: place.
_APPROXIMATE = 2.0**-20


def check_scale(evidence: Evidence) -> Iterator[Verdict]:
    """O3: scale equals the plan's rule applied to amax, bit for bit."""
    return _each_operand(evidence, "O3", judge_scale)


def judge_scale(
    evidence: Evidence, arm: str, role: Role, side: str, seen: Seen, operand: Operand
) -> Verdict:
    """O3 for one operand."""
    if seen.values is not None or evidence.scale_hidden(role, seen):
        return plain("O3", arm, role, "inconclusive", "scale is not observable")
    assert operand.quantised is not None and seen.scale is not None
    amax = operand.quantised.amax if seen.amax is None else seen.amax
    got, expected = seen.scale, expected_scale(seen, operand)
    if identical(got, expected):
        return plain("O3", arm, role, "ok")
    bad = ~same_bits(got, expected)
    rule, fmt = operand.plan.scale, operand.plan.format
    if isinstance(rule, TwoLevelScale) and fmt is not None:  # a NaN tensor scale voids all blocks
        bad &= ~(rule.void(got, fmt) & rule.void(expected, fmt))
    if arm in evidence.approximate and got.dtype == np.float32:
        with np.errstate(invalid="ignore"):
            bad &= ~(np.abs(got - expected) <= _APPROXIMATE * np.abs(expected))
    if not bad.any():
        return plain("O3", arm, role, "ok")
    known, bad = _explain_scale(evidence, operand.plan, amax, seen, bad)
    if not bad.any():
        return plain("O3", arm, role, "ok").known(known)
    at = first(bad)
    symptom = _scale_symptom(got[at], expected[at], amax[at], operand.plan)
    given = (Given("amax", _at("amax", role, side, at), bits(amax[at])),)
    place, actual, expect = _at("scale", role, side, at), str(_scale(got[at])), _scale(expected[at])
    return diverged("O3", arm, role, symptom, place, actual, expect, given=given)


def expected_scale(seen: Seen, operand: Operand) -> Scale:
    """The plan's scale for the observed amax, or for the correct one if none was observed; inverted
    if the observed scale is an inverse."""
    assert operand.quantised is not None
    amax = operand.quantised.amax if seen.amax is None else seen.amax
    planned = identical(amax, operand.quantised.amax)  # the reference has made that scale already
    expected = operand.quantised.scale if planned else reference.scale(amax, operand.plan)
    if not seen.scale_is_inverse:
        return expected
    with np.errstate(divide="ignore"):
        return (np.float32(1.0) / expected).astype(np.float32)


def _explain_scale(
    evidence: Evidence, plan: OperandPlan, amax: Any, seen: Seen, bad: Any
) -> tuple[str, Any]:
    for deviation, entry in evidence.deviations.items():
        other = reference.scale_as_built(amax, plan, deviation)
        if other is None:
            continue
        with np.errstate(divide="ignore"):
            as_built = np.float32(1.0) / other if seen.scale_is_inverse else other
        explained = bad & (seen.scale == as_built)
        if explained.any():
            return entry, bad & ~explained
    return "", bad


def _scale_symptom(got: Any, expected: Any, amax: Any, plan: OperandPlan) -> str:
    if isinstance(plan.scale, MxScale):
        step = int(got) - int(expected)
        if not np.isfinite(amax):
            return "scale of a granule with Inf or NaN"
        return f"scale byte {'+' if step > 0 else '-'}{'1' if abs(step) == 1 else 'n'}"
    if isinstance(plan.scale, TwoLevelScale):
        return "block scale"
    if not np.isfinite(amax) or not np.isfinite(got):
        return "scale of a granule with Inf or NaN"
    if got == 2 * expected or 2 * got == expected:
        return "scale off by a factor 2"
    return "scale value"


def _scale(scale: Any) -> Is:
    """A scale as an expectation; of a two-level scale the inner one, whose byte is a code."""
    if np.asarray(scale).dtype.names:
        return Is(bits(int(scale["block"])), byte=True)
    return Is(bits(scale), byte=np.asarray(scale).dtype == np.uint8)


def check_cast(evidence: Evidence) -> Iterator[Verdict]:
    """O2: codes equal nearest-even(x * s) with the observed scale."""
    return _each_operand(evidence, "O2", judge_cast)


def judge_cast(
    evidence: Evidence, arm: str, role: Role, side: str, seen: Seen, operand: Operand
) -> Verdict:
    """O2 for one operand."""
    if seen.values is not None:
        return _check_values(evidence, arm, role, side, seen)
    return _check_codes(evidence, arm, role, side, seen, operand)


def _powers(scale: Any) -> bool:
    """True if all scales are powers of two, which do not depend on how a quotient is rounded."""
    return bool((np.frexp(scale)[0] == 0.5).all())


def _check_codes(
    evidence: Evidence, arm: str, role: Role, side: str, seen: Seen, operand: Operand
) -> Verdict:
    plan, fmt = operand.plan, operand.plan.format
    assert fmt is not None and operand.quantised is not None and seen.codes is not None
    scale = evidence.seen_scale(role, side, seen)
    if scale is None:
        return plain("O2", arm, role, "inconclusive", "scale is not observable")
    if arm in evidence.approximate and scale.dtype == np.float32 and not _powers(scale):
        return plain("O2", arm, role, "inconclusive", "its code divides by approximation")
    expected = expected_codes(scale, operand)
    if identical(seen.codes, expected):
        return _exact_codes(arm, role, scale, plan)
    bad = _code_mismatch(evidence, arm, seen.codes, expected, scale, plan)
    if plan.rounding == "stochastic":
        for neighbour in reference.admissible(operand.x, scale, plan):
            bad &= _code_mismatch(evidence, arm, seen.codes, neighbour, scale, plan)
    if not bad.any():
        return _exact_codes(arm, role, scale, plan)
    unexplained = bad
    for deviation, entry in evidence.deviations.items():
        as_built = reference.codes(operand.x, scale, plan, deviation=deviation)
        differs = _code_mismatch(evidence, arm, seen.codes, as_built, scale, plan)
        if not (bad & differs).any():
            return plain("O2", arm, role, "ok").known(entry)
        unexplained = unexplained & differs
    at = _first_of(unexplained, bad)
    got, want = decode(seen.codes, fmt)[at], decode(expected, fmt)[at]
    symptom, place = _code_symptom(got, want, scale, plan, at), _at("codes", role, side, at)
    expect: Is | Within = Is(bits(want), signed=not evidence.compiled(arm))
    if plan.rounding == "stochastic":
        low, high = (decode(one, fmt)[at] for one in reference.admissible(operand.x, scale, plan))
        expect = between(low, high)
    given = _source(role, side, at, operand.x)
    return diverged("O2", arm, role, symptom, place, number(got), expect, given=given)


def expected_codes(scale: Scale, operand: Operand) -> Any:
    """The codes that the plan's cast gives with the observed scale."""
    planned = operand.quantised
    assert planned is not None
    if scale.tobytes() == planned.scale.tobytes():  # the reference has made these already
        return planned.codes
    return reference.codes(operand.x, scale, operand.plan)


def _exact_codes(arm: str, role: Role, scale: Any, plan: OperandPlan) -> Verdict:
    if np.all(reference.meaningless(scale, plan)):
        return plain("O2", arm, role, "inconclusive", "every scale is NaN")
    return plain("O2", arm, role, "ok")


def _code_mismatch(
    evidence: Evidence, arm: str, got: Any, want: Any, scale: Any, plan: OperandPlan
) -> Any:
    assert plan.format is not None
    if evidence.compiled(arm):  # generated code does not keep the sign of zero
        bad = ~same_bits(decode(got, plan.format), decode(want, plan.format))
    else:
        bad = canonical(got, plan.format) != canonical(want, plan.format)
    return bad & ~reference.meaningless(scale, plan)


def _code_symptom(got: Any, want: Any, scale: Any, plan: OperandPlan, at: tuple[int, ...]) -> str:
    assert plan.format is not None
    if isinstance(plan.scale, MxScale) and reference.broadcast_granules(scale, plan)[at] == 0:
        return "codes of an MX block with scale byte 0"
    if np.isnan(got) or np.isnan(want):
        return "NaN code"
    if abs(want) == plan.format.max or abs(got) == plan.format.max:
        return "saturated code"
    return "rounded code"


def _check_values(evidence: Evidence, arm: str, role: Role, side: str, seen: Seen) -> Verdict:
    """Level B: judges the dequantised operand, which is determined to the bit if scales are powers
    of two or quotients are correctly rounded."""
    expected = evidence.reference.values(role, side)
    assert seen.values is not None
    with np.errstate(over="ignore", invalid="ignore"):
        bad = ~same_bits(seen.values, expected.astype(np.float32))
    operand = evidence.reference.operand(role, side)
    assert operand.quantised is not None
    if bad.any() and arm in evidence.approximate and operand.quantised.scale.dtype == np.float32:
        bad &= ~_near(seen.values, _values_nearby(evidence, role, operand))
    if not bad.any():
        return plain("O2", arm, role, "ok")
    unexplained = bad
    for deviation, entry in evidence.deviations.items():
        explained = np.zeros(bad.shape, dtype=bool)
        for values in _values_as_built(evidence, role, operand, deviation):
            explained |= same_bits(seen.values, values)
        if not (bad & ~explained).any():
            return plain("O2", arm, role, "ok").known(entry)
        unexplained = unexplained & ~explained
    at = _first_of(unexplained, bad)
    place, given = _at("values", role, side, at), _source(role, side, at, operand.x)
    got, want = seen.values[at], np.float32(expected[at])
    return unequal("O2", arm, role, LEVEL_B, place, got, want, given=given)


def _values_nearby(evidence: Evidence, role: Role, operand: Operand) -> list[Any]:
    """The dequantised operand with the plan's scales, and with scales as far from these as an
    approximate division may leave them. The division of a code by the scale is approximate, too:
    ``_near`` allows for that."""
    assert operand.quantised is not None
    scales = [
        (operand.quantised.scale * factor).astype(np.float32)
        for factor in (1.0 - _APPROXIMATE, 1.0, 1.0 + _APPROXIMATE)
    ]
    return [_values_of(evidence, role, operand, scale) for scale in scales]


def _near(got: Any, values: Sequence[Any]) -> Any:
    """True where ``got`` is one of these values, up to the error of an approximate division."""
    near = np.zeros(got.shape, dtype=bool)
    with np.errstate(invalid="ignore"):
        for value in values:
            near |= np.abs(got - value) <= 2.0 * _APPROXIMATE * np.abs(value)
    return near


def _first_of(unexplained: Any, bad: Any) -> tuple[int, ...]:
    """The first element in ``unexplained``, whose elements no deviation explains, else the first in
    ``bad``: an element that a deviation explains would also be wrong in a library without the new
    bug."""
    return first(unexplained if unexplained.any() else bad)


def _values_as_built(evidence: Evidence, role: Role, operand: Operand, deviation: str) -> list[Any]:
    assert operand.quantised is not None
    scale = operand.quantised.scale
    scales: list[Any] = [scale]
    other = reference.scale_as_built(operand.quantised.amax, operand.plan, deviation)
    if other is not None:
        scales.append(other.astype(scale.dtype))
    return [_values_of(evidence, role, operand, s, deviation) for s in scales]


def _values_of(
    evidence: Evidence, role: Role, operand: Operand, scale: Any, deviation: str = ""
) -> Any:
    codes = reference.codes(operand.x, scale, operand.plan, deviation=deviation)
    exact = reference.values(codes, scale, operand.plan)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = reference.multiplied(exact, evidence.plan.gemms[role], evidence.spec.dtype)
        return rounded.astype(np.float32)


def _at(what: What, role: Role, side: str, index: tuple[int, ...]) -> At:
    return At(what=what, name=role, side=side, index=index)  # type: ignore[arg-type]


def _source(role: Role, side: str, index: tuple[int, ...], x: Any) -> tuple[Given, ...]:
    """The element that was quantised there."""
    return (Given("x", _at("source", role, side, index), bits(x[index])),)
