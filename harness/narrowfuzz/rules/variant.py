"""A variant: the same layer's work arranged differently, and what must be the same in both runs.

The precondition is not a table but the plan, executed on both: where it gives the same elements the
same codes and scales, the library must, too. The GEMM's result then has the same bits on the
lattice, where no order of sums matters, and lies in the interval of bound 3.2 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import F32, decode
from narrowfuzz.numerics.plan import ROLES, OperandPlan, Role
from narrowfuzz.operators.linear import Reference, single_reference
from narrowfuzz.rules.evidence import BY_CHANCE, Evidence
from narrowfuzz.rules.gemm import centre_and_radius, observed, on_lattice, within
from narrowfuzz.rules.rerun import again, base_of, compare
from narrowfuzz.rules.rule import plain, same_bits
from narrowfuzz.trace.address import At, What
from narrowfuzz.trace.expect import Same
from narrowfuzz.trace.trace import Seen, Trace
from narrowfuzz.trace.verdict import OtherRun, Verdict

Index = NDArray[np.intp]

#: Which dimensions the canonical operands and the results run over: rows, columns.
OPERAND_AXES = {
    ("output", "a"): ("m", "k"),
    ("output", "b"): ("n", "k"),
    ("grad_input", "a"): ("m", "n"),
    ("grad_input", "b"): ("k", "n"),
    ("grad_weight", "a"): ("n", "m"),
    ("grad_weight", "b"): ("k", "m"),
}
RESULT_AXES = {"output": ("m", "n"), "grad_input": ("m", "k"), "grad_weight": ("n", "k")}
#: For linear(w, x) in place of linear(x, w): GEMM of the case -> the swapped layer's GEMM that does
#: the same work.
_SWAPPED: dict[Role, Role] = {
    "output": "output",
    "grad_input": "grad_weight",
    "grad_weight": "grad_input",
}


@dataclass(frozen=True)
class Variant:
    """Element i of the variant's dimension m is element ``index["m"][i]`` of the case's; likewise
    for k and n.

    The variant may have zeros after them (padding), or only some of the case's elements (a split).
    """

    run: OtherRun
    index: dict[str, Index]
    #: Roles whose contracted axis is complete in the variant.
    roles: tuple[Role, ...] = ROLES
    #: Roles whose results have equal bits off the lattice, too: the same kernel, the same shape.
    strict: tuple[Role, ...] = ()
    #: Input and weight have changed places, and with them the two gradients.
    swapped: bool = False
    #: If a relation has several variants: words for this one, which are part of the symptom.
    title: str = ""

    def take(self, x: Any, axes: tuple[str, str]) -> Any:
        """The elements of a 2-D array of the case that the variant holds, in its order."""
        return x[np.ix_(self.index[axes[0]], self.index[axes[1]])]

    def trim(self, x: Any, axes: tuple[str, str]) -> Any:
        """A 2-D array of the variant without its padding."""
        return x[: len(self.index[axes[0]]), : len(self.index[axes[1]])]

    def operand(self, role: Role, side: str) -> tuple[Role, str]:
        """Role and side at which the variant has the operand that the case has at (role, side)."""
        if not self.swapped:
            return role, side
        return _SWAPPED[role], {"a": "b", "b": "a"}[side] if role == "output" else side

    def result(self, trace: Trace, role: Role) -> F32:
        """The variant's result in the case's orientation."""
        got = trace.outputs[self.operand(role, "a")[0]]
        return got.T if self.swapped and role == "output" else got


def everything(spec: Spec) -> dict[str, Index]:
    """The indices of a variant that holds all elements in the case's order."""
    return {"m": np.arange(spec.tokens), "k": np.arange(spec.k), "n": np.arange(spec.n)}


def judge_variant(evidence: Evidence, name: str, variant: Variant) -> Iterator[Verdict]:
    """Compares operands and result of each role in which the plan treats case and variant alike."""
    if not evidence.spec.trains:  # then the gradients' operands need not be quantisable
        yield plain(name, evidence.base, "output", "not_applicable", "no backward")
        return
    theirs = evidence.promised(variant.run.spec)
    other = single_reference(theirs, evidence.spec.dtype, dict(variant.run.tensors))
    alike = [role for role in variant.roles if _alike(evidence, other, variant, role)]
    for role in variant.roles:
        if role not in alike:
            yield plain(
                name, evidence.base, role, "not_applicable", "the plan quantises it differently"
            )
    if base_of(evidence) is not None and alike:
        after = again(evidence, variant.run)
        yield from judge_against(evidence, name, replace(variant, roles=tuple(alike)), after)


def judge_against(
    evidence: Evidence, name: str, variant: Variant, after: Trace | None
) -> Iterator[Verdict]:
    """Compares operands and result of the variant's roles with ``after``, the variant's run, which
    is None if it failed."""
    base = base_of(evidence)
    assert base is not None
    for role in variant.roles:
        if after is None:
            yield plain(name, evidence.base, role, "inconclusive", "the rerun failed")
            continue
        yield from _operands(evidence, name, variant, role, base, after)
        if evidence.plan.gemms[role].stochastic:
            yield plain(name, evidence.base, role, "not_applicable", BY_CHANCE)
            continue
        yield _result(evidence, name, variant, role, base, after)


def _alike(evidence: Evidence, other: Reference, variant: Variant, role: Role) -> bool:
    for side in ("a", "b"):
        axes = OPERAND_AXES[role, side]
        before = evidence.reference.operand(role, side)
        if not other.divides(*variant.operand(role, side)):
            return False
        after = other.operand(*variant.operand(role, side))
        if before.plan != after.plan:
            return False
        if before.quantised is None or after.quantised is None:
            continue
        pairs = (
            (before.quantised.values, after.quantised.values),
            (
                _decoded(before.quantised.codes, before.plan),
                _decoded(after.quantised.codes, after.plan),
            ),
            (
                _spread(before.quantised.scale, before.plan, before.x.shape),
                _spread(after.quantised.scale, after.plan, after.x.shape),
            ),
        )
        if not all(same_bits(variant.take(x, axes), variant.trim(y, axes)).all() for x, y in pairs):
            return False
    gemm, there = evidence.plan.gemms[role], other.plan.gemms[variant.operand(role, "a")[0]]
    return replace(there, a=gemm.a, b=gemm.b) == gemm


def _decoded(codes: Any, plan: OperandPlan) -> Any:
    assert plan.format is not None
    return decode(codes, plan.format)


def _spread(scale: Any, plan: OperandPlan, shape: tuple[int, ...]) -> Any:
    """The value that a code of 1 represents, for each element."""
    assert plan.scale is not None
    return np.broadcast_to(reference.broadcast_granules(plan.scale.unit(scale), plan), shape)


def _operands(
    evidence: Evidence, name: str, variant: Variant, role: Role, base: Trace, after: Trace
) -> Iterator[Verdict]:
    if evidence.plan.gemms[role].a.format is None and evidence.plan.gemms[role].b.format is None:
        return
    before, there = base.main_site(role), after.main_site(variant.operand(role, "a")[0])
    if before is None or there is None:
        yield plain(name, evidence.base, role, "inconclusive", "operands were not seen")
        return
    for side, seen in (("a", before.a), ("b", before.b)):
        other = there.a if variant.operand(role, side)[1] == "a" else there.b
        if evidence.reference.operand(role, side).plan.rounding == "stochastic":
            continue
        yield _operand(evidence, name, variant, role, side, seen, other)


def _operand(
    evidence: Evidence, name: str, variant: Variant, role: Role, side: str, seen: Seen, other: Seen
) -> Verdict:
    """Compares observed codes and scales of one operand, element for element."""
    axes, operand = OPERAND_AXES[role, side], evidence.reference.operand(role, side)
    plan, shape = operand.plan, operand.x.shape
    pairs: list[tuple[str, What, Any, Any]] = []
    if plan.format is not None and seen.codes is not None and other.codes is not None:
        pairs.append(("codes", "codes", _decoded(seen.codes, plan), _decoded(other.codes, plan)))
        if seen.scale is not None and other.scale is not None:
            there = other.codes.shape
            spread = _spread(seen.scale, plan, shape), _spread(other.scale, plan, there)
            pairs.insert(0, ("scale", "scale", *spread))
    elif seen.values is not None and other.values is not None:
        pairs.append(("operand", "values", seen.values, other.values))
    for named, what, x, y in pairs:
        got, want = variant.trim(y, axes), variant.take(x, axes)
        symptom = f"{named} changes{variant.title}"
        verdict = compare(
            evidence, name, role, got, want, symptom, variant.run, At(what=what, side="a")
        )
        if verdict.status != "ok":
            return _placed(verdict, variant, role, side, plan)
    return plain(
        name, evidence.base, role, "ok" if pairs else "inconclusive", "" if pairs else "unseen"
    )


def _placed(
    verdict: Verdict, variant: Variant, role: Role, side: str, plan: OperandPlan
) -> Verdict:
    """The verdict with the addresses of the operand's element in the variant and in the case."""
    if not isinstance(verdict.expect, Same):
        return verdict
    at, axes = verdict.at.index, OPERAND_AXES[role, side]
    (there, its_side), what = variant.operand(role, side), verdict.at.what
    source = tuple(int(variant.index[dim][i]) for dim, i in zip(axes, at, strict=True))
    if what == "scale":
        at, source = reference.granule(at, plan), reference.granule(source, plan)
    here = At(what=what, name=role, side=side, index=source)  # type: ignore[arg-type]
    over = At(what=what, run=variant.run.name, name=there, side=its_side, index=at)  # type: ignore[arg-type]
    same = msgspec.structs.replace(verdict.expect, at=here)
    return replace(verdict, at=over, expect=same)


def _result(
    evidence: Evidence, name: str, variant: Variant, role: Role, base: Trace, after: Trace
) -> Verdict:
    axes, want = RESULT_AXES[role], base.outputs[role]
    part = np.ix_(variant.index[axes[0]], variant.index[axes[1]])
    got = want.copy()
    got[part] = variant.trim(variant.result(after, role), axes)
    lattice = on_lattice(evidence, role)
    if role in variant.strict or (lattice and not bias_may_fuse(evidence, role)):
        symptom = f"result changes{variant.title}"
        return _moved(compare(evidence, name, role, got, want, symptom, variant.run), variant, role)
    a, b = observed(evidence, base, role)
    if a is None or b is None:
        return plain(name, evidence.base, role, "inconclusive", "operands were not seen")
    centre, radius = centre_and_radius(evidence, role, a, b)
    skip = np.ones(got.shape, dtype=bool)
    skip[part] = False
    skip |= evidence.reference.may_overflow(role) | np.isnan(centre)
    verdict = within(
        evidence, name, evidence.base, role, got, centre, 0.0 if lattice else radius, skip
    )
    if verdict.status != "diverged":
        return verdict
    symptom = f"result leaves its bound{variant.title}"
    return _moved(replace(verdict, symptom=symptom, runs=(variant.run,)), variant, role)


def _moved(verdict: Verdict, variant: Variant, role: Role) -> Verdict:
    """The verdict with the address of the result's element in the variant."""
    if verdict.status != "diverged":
        return verdict
    there = tuple(
        int(np.flatnonzero(variant.index[dim] == i)[0])
        for dim, i in zip(RESULT_AXES[role], verdict.at.index, strict=True)
    )
    if variant.swapped and role == "output":
        there = there[::-1]
    at = At(run=variant.run.name, name=variant.operand(role, "a")[0], index=there)
    return replace(verdict, at=at)


def bias_may_fuse(evidence: Evidence, role: Role) -> bool:
    """True if the kernel may choose, depending on the shape, to fuse the bias, which saves one
    rounding."""
    return role == "output" and "bias" in evidence.tensors and evidence.plan.bias == "either"
