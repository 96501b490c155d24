"""Relations between quantisers: other granules, same power-of-two grid (R21, R22).

A power-of-two scale moves no element between two neighbouring codes as long as the element stays
inside the format's normal range: there, every recipe, mode and granularity must give the same
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import F64, FP32, Format, decode
from narrowfuzz.numerics.plan import ROLES, OperandPlan, Plan, Role
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rerun import again, base_of
from narrowfuzz.rules.rule import diverged, first, plain, unequal
from narrowfuzz.trace.address import At, What
from narrowfuzz.trace.expect import Given, Same, bits, number
from narrowfuzz.trace.trace import Seen, Trace
from narrowfuzz.trace.verdict import OtherRun, Verdict

#: Tensor -> (role, side) of its row-quantised copy and of its column-quantised one, which is
#: transposed.
COPIES: dict[str, tuple[tuple[Role, str], tuple[Role, str]]] = {
    "input": (("output", "a"), ("grad_weight", "b")),
    "weight": (("output", "b"), ("grad_input", "b")),
    "grad_output": (("grad_input", "a"), ("grad_weight", "a")),
}


def check_copies(evidence: Evidence) -> Iterator[Verdict]:
    """R22: both quantised copies of one tensor agree where both are inside the normal range."""
    for arm, trace in evidence.traces.items():
        for tensor, ((role, side), (other, there)) in COPIES.items():
            if not evidence.spec.trains:
                yield plain("R22", arm, other, "not_applicable", "a backward makes the other copy")
                continue
            plans = [evidence.reference.operand(*copy).plan for copy in COPIES[tensor]]
            if trace.error is not None or not _same_grid(*plans):
                yield plain("R22", arm, other, "not_applicable", "scales are not powers of two")
                continue
            seen = [_seen(trace.main_site(r), s) for r, s in COPIES[tensor]]
            if any(s is None or s.codes is None for s in seen):
                yield plain("R22", arm, other, "inconclusive", trace.unobserved or "not tapped")
                continue
            yield _agree(evidence, arm, other, there, (role, side), seen[0], seen[1])


def _same_grid(x: OperandPlan, y: OperandPlan) -> bool:
    return x.format is not None and x.format == y.format and x.power_of_two and y.power_of_two


def _seen(site: Any, side: str) -> Seen | None:
    return None if site is None else site.a if side == "a" else site.b


def _agree(
    evidence: Evidence, arm: str, role: Role, side: str, row: tuple[Role, str], x: Any, y: Any
) -> Verdict:
    """Compares the significands of both copies, which need no scale, and their values if both
    scales were observed."""
    plan_x, plan_y = (evidence.reference.operand(r, s).plan for r, s in (row, (role, side)))
    fmt = plan_x.format
    assert fmt is not None
    codes = decode(x.codes, fmt).T, decode(y.codes, fmt)
    compared = inside(codes[0], fmt) & inside(codes[1], fmt)
    with np.errstate(invalid="ignore"):  # smaller elements may be flushed before they are scaled
        compared &= np.abs(evidence.reference.operand(role, side).x) >= FP32.min_normal
    if not compared.any():
        return plain("R22", arm, role, "inconclusive", "no element is inside both ranges")
    pairs: list[tuple[str, What, Any, Any]] = [
        ("significand", "significand", np.frexp(codes[0])[0], np.frexp(codes[1])[0])
    ]
    values = seen_value(x, plan_x), seen_value(y, plan_y)
    if values[0] is not None and values[1] is not None:
        pairs.append(("value", "values", values[0].T, values[1]))
        compared &= usual_scale(x, plan_x).T & usual_scale(y, plan_y)
    for what, seen_as, want, got in pairs:
        bad = compared & (want != got)
        if bad.any():
            at = first(bad)
            copy = At(what=seen_as, name=row[0], side=row[1], index=at[::-1])  # type: ignore[arg-type]
            here = At(what=seen_as, name=role, side=side, index=at)  # type: ignore[arg-type]
            symptom = f"{what} differs from the {row[0]} copy"
            expect = Same(copy, number(want[at]))
            return diverged("R22", arm, role, symptom, here, number(got[at]), expect)
    return plain("R22", arm, role, "ok")


def inside(decoded: F64, fmt: Format) -> Any:
    """True for values strictly between the smallest normal and the largest one, which are rounded
    like any other."""
    with np.errstate(invalid="ignore"):
        return (np.abs(decoded) > fmt.min_normal) & (np.abs(decoded) < fmt.max)


def seen_value(seen: Seen, plan: OperandPlan) -> F64 | None:
    """The dequantised operand, made only of what was observed; None if codes or scale were not."""
    if seen.codes is None or seen.scale is None or seen.scale_is_inverse:
        return None
    with np.errstate(all="ignore"):
        return reference.values(seen.codes, seen.scale, plan)


def usual_scale(seen: Seen, plan: OperandPlan) -> Any:
    """True for elements whose scale is an ordinary number: no byte 0 (libraries read it in two
    ways) or 254, no NaN, no Inf."""
    assert seen.scale is not None and seen.codes is not None
    if seen.scale.dtype == np.uint8:
        usual = (seen.scale >= 1) & (seen.scale <= 253)
    else:
        usual = np.isfinite(seen.scale) & (seen.scale > 0)
    return np.broadcast_to(reference.broadcast_granules(usual, plan), seen.codes.shape)


def check_recipe(evidence: Evidence) -> Iterator[Verdict]:
    """R21: another recipe with power-of-two scales dequantises to the same values."""
    base = base_of(evidence)
    quantised = [o for gemm in evidence.plan.gemms.values() for o in (gemm.a, gemm.b)]
    peers = evidence.peers() if any(o.power_of_two for o in quantised) else {}
    if base is None or not peers:
        yield plain(
            "R21", evidence.base, "output", "not_applicable", "no other power-of-two recipe"
        )
        return
    names = sorted(peers)
    for name in names if evidence.focus is None else [names[evidence.focus % len(names)]]:
        yield from _agrees(evidence, base, name, *peers[name])


def _agrees(
    evidence: Evidence, base: Trace, name: str, other: Spec, peer: Plan
) -> Iterator[Verdict]:
    """Compares the layer's operands with those of one other recipe."""
    spec = msgspec.structs.replace(
        other,
        batch=0,
        m=evidence.spec.tokens,
        bias=False,
        input_layout="contiguous",
        grad_layout="contiguous",
        checkpoint="none",
        compile="none",
    )
    tensors = {t: x for t, x in evidence.tensors.items() if t != "bias"}
    after = again(evidence, OtherRun(name, spec, tensors))
    for role in ROLES:
        before, there = base.main_site(role), after.main_site(role) if after else None
        if before is None or there is None:
            yield plain("R21", evidence.base, role, "inconclusive", "operands were not seen")
            continue
        for side in ("a", "b"):
            yield _matches(evidence, role, side, name, peer, before, there)


def _matches(
    evidence: Evidence, role: Role, side: str, name: str, plan: Plan, before: Any, there: Any
) -> Verdict:
    ours = evidence.reference.operand(role, side).plan
    theirs = plan.gemms[role].a if side == "a" else plan.gemms[role].b
    x, y = _seen(before, side), _seen(there, side)
    assert x is not None and y is not None
    if not _same_grid(ours, theirs):
        return plain("R21", evidence.base, role, "not_applicable", "another format or scale rule")
    got, want = seen_value(x, ours), seen_value(y, theirs)
    if got is None or want is None:
        return plain("R21", evidence.base, role, "inconclusive", "scale is not observable")
    assert ours.format is not None
    compared = usual_scale(x, ours) & usual_scale(y, theirs)
    for seen in (x, y):
        assert seen.codes is not None
        compared &= inside(decode(seen.codes, ours.format), ours.format)
    with np.errstate(invalid="ignore"):
        compared &= np.abs(evidence.reference.operand(role, side).x) >= FP32.min_normal
    if not compared.any():
        return plain("R21", evidence.base, role, "inconclusive", "no element is inside both ranges")
    bad = compared & (got != want)
    if not bad.any():
        return plain("R21", evidence.base, role, "ok")
    at = first(bad)
    here = At(what="values", name=role, side=side, index=at)  # type: ignore[arg-type]
    there_too = msgspec.structs.replace(here, run=name)
    given = Given(name, there_too, bits(want[at]))
    return unequal(
        "R21",
        evidence.base,
        role,
        "differs from another recipe's value",
        here,
        got[at],
        want[at],
        given=(given,),
    )
