"""Relations of shape: permute, pad, split or transpose the data, and nothing else may change.

R5-R9, R11, R16 and R17 are variants (``variant.py``):

    R5, R6, R7  tokens, output features or K permuted, within blocks and by whole blocks
    R8          a whole block of zeros appended to K
    R9          zero rows appended to the batch; the batch in two parts; where batch invariance is
                promised also one row by itself, and all results are compared to the bit
    R11         linear(w, x) is linear(x, w) transposed, with the two gradients exchanged
    R16         strided, transposed and expanded tensors against their contiguous copies
    R17         a 3-D input against the flattened one

R10 adds the weight gradients of the two parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from narrowfuzz.case.data import hash_bits
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.numerics import bounds
from narrowfuzz.numerics.formats import F32, F64
from narrowfuzz.numerics.plan import ROLES, Plan, Role
from narrowfuzz.operators.linear import single_reference
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.expected import NOTHING
from narrowfuzz.rules.gemm import on_lattice
from narrowfuzz.rules.rerun import again, base_of
from narrowfuzz.rules.rule import diverged, first, plain
from narrowfuzz.rules.variant import Index, Variant, everything, judge_variant
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import between, number
from narrowfuzz.trace.verdict import OtherRun, Verdict

#: Which tensors' rows and columns run over which dimension.
AXES = {"input": ("m", "k"), "weight": ("n", "k"), "grad_output": ("m", "n")}
#: The GEMM that contracts a dimension: its blocks run along it.
_CONTRACTS: dict[str, Role] = {"m": "grad_weight", "n": "grad_input", "k": "output"}
#: Zeros appended, and the multiple that a batch is split at, where the plan has no blocks.
_PAD, _SPLIT = 32, 16
_WHY_NOT = {"R16": "contiguous already", "R17": "input is 2-D", "R9": "nothing to split"}


def check_variants(evidence: Evidence, name: str) -> Iterator[Verdict]:
    """R5-R9, R11, R16, R17: every variant of the case has the operands and results of the case."""
    found = variants(name, evidence.case, evidence.plan, evidence.tensors)
    if name == "R9" and evidence.batch_invariant:
        found = _promised(evidence.spec, evidence.tensors, found)
    for variant in found:
        yield from judge_variant(evidence, name, variant)
    if not found:
        why = _WHY_NOT.get(name, "nothing to permute")
        yield plain(name, evidence.base, "output", "not_applicable", why)


def variants(name: str, case: Case, plan: Plan, tensors: dict[str, F32]) -> tuple[Variant, ...]:
    """The variants of a case for one relation; empty if it does not apply to the case."""
    spec = case.spec
    if name in _PERMUTED:
        return _permuted(spec, plan, tensors, _PERMUTED[name], case.data.choice)
    if name == "R8":
        return (_padded(spec, plan, tensors, "k"),)
    if name == "R9":
        return (_padded(spec, plan, tensors, "m"), *halves(spec, plan, tensors))
    if name == "R11":
        return (_swapped(spec, tensors),)
    if name == "R16":
        copies = msgspec.structs.replace(
            spec, input_layout="contiguous", grad_layout="contiguous", weight_layout="contiguous"
        )
        run = OtherRun("contiguous copies", copies, tensors)
        return (Variant(run, everything(spec)),) if copies != spec else ()
    assert name == "R17", name
    run = OtherRun("a flattened input", flat(spec, spec.tokens), tensors)
    flattened = Variant(run, everything(spec), strict=_strict(spec, plan))
    return (flattened,) if spec.batch else ()


def _strict(spec: Spec, plan: Plan) -> tuple[Role, ...]:
    """Roles in which flattening changes neither kernel nor strides: a transposed or expanded tensor
    may reach another kernel as a contiguous copy, and a bias may be fused in one of them."""
    if {spec.input_layout, spec.grad_layout, spec.weight_layout} != {"contiguous"}:
        return ()
    return ROLES[1:] if spec.bias and plan.bias == "either" else ROLES


_PERMUTED = {"R5": "m", "R6": "n", "R7": "k"}


def _permuted(
    spec: Spec, plan: Plan, tensors: dict[str, F32], dim: str, seed: int
) -> tuple[Variant, ...]:
    """The case with one dimension permuted so that blocks keep their elements: whole blocks move,
    and elements move inside their block."""
    index = everything(spec)
    size = len(index[dim])
    if size < 2:
        return ()
    block = _block(plan, dim) or 1
    bits = hash_bits(seed + 1, "input", 2, size)
    inside = np.argsort(bits[1, :block], kind="stable")
    blocks = np.argsort(bits[0, : size // block], kind="stable")
    index[dim] = (blocks[:, None] * block + inside[None, :]).ravel()
    title = {"m": "permuted tokens", "n": "permuted outputs", "k": "permuted inputs"}[dim]
    return (Variant(OtherRun(title, spec, _taken(tensors, index)), index),)


def _block(plan: Plan, dim: str) -> int:
    """The block in which the GEMM that contracts ``dim`` shares its scales, 0 for none."""
    gemm = plan.gemms[_CONTRACTS[dim]]
    return max(gemm.a.block, gemm.b.block)


def _taken(tensors: dict[str, F32], index: dict[str, Index]) -> dict[str, F32]:
    taken = {t: tensors[t][np.ix_(index[rows], index[cols])] for t, (rows, cols) in AXES.items()}
    if "bias" in tensors:
        taken["bias"] = tensors["bias"][index["n"]]
    return taken


def _padded(spec: Spec, plan: Plan, tensors: dict[str, F32], dim: str) -> Variant:
    """The case with a whole block of zeros appended to k, or to the tokens of a flattened input."""
    zeros = _block(plan, dim) or _PAD
    bigger = dict(tensors)
    for name, axes in AXES.items():
        if dim in axes:
            width = [(0, zeros if axis == dim else 0) for axis in axes]
            bigger[name] = np.pad(tensors[name], width)
    if dim == "k":
        wider = OtherRun("padded inputs", msgspec.structs.replace(spec, k=spec.k + zeros), bigger)
        return Variant(wider, everything(spec))
    longer = OtherRun("padded tokens", flat(spec, spec.tokens + zeros), bigger)
    return Variant(longer, everything(spec), title=" when padded")


def flat(spec: Spec, tokens: int) -> Spec:
    """The Spec with a 2-D input of this many tokens; input and output gradient are contiguous."""
    return msgspec.structs.replace(
        spec, batch=0, m=tokens, input_layout="contiguous", grad_layout="contiguous"
    )


def halves(spec: Spec, plan: Plan, tensors: dict[str, F32]) -> tuple[Variant, ...]:
    """The batch in two parts, each of whole blocks; empty if the batch is too small."""
    unit = _block(plan, "m") or _SPLIT
    middle = spec.tokens // unit // 2 * unit
    if not middle and not _block(plan, "m"):
        middle = spec.tokens // 2
    if not 0 < middle < spec.tokens:
        return ()
    first, second = np.split(np.arange(spec.tokens), [middle])
    return (
        _part(spec, tensors, first, "the first half"),
        _part(spec, tensors, second, "the second half"),
    )


def _promised(
    spec: Spec, tensors: dict[str, F32], found: tuple[Variant, ...]
) -> tuple[Variant, ...]:
    """The variants under a promise of batch invariance: single rows are added, and each row must
    have the bits that it has in the whole batch."""
    last = spec.tokens - 1
    rows = [("the first row alone", 0), *([("the last row alone", last)] if last > 0 else [])]
    single_rows = [_part(spec, tensors, np.array([row]), title) for title, row in rows]
    by_rows: tuple[Role, ...] = ("output", "grad_input")
    return tuple(replace(variant, strict=by_rows) for variant in (*found, *single_rows))


def _part(spec: Spec, tensors: dict[str, F32], rows: Index, title: str) -> Variant:
    index = everything(spec) | {"m": rows}
    run = OtherRun(title, flat(spec, len(rows)), _taken(tensors, index))
    return Variant(run, index, roles=("output", "grad_input"), title=f" in {title}")


def _swapped(spec: Spec, tensors: dict[str, F32]) -> Variant:
    """Input and weight exchanged, without the bias, which belongs to one of them."""
    other = msgspec.structs.replace(flat(spec, spec.n), n=spec.tokens, bias=False)
    exchanged = {
        "input": tensors["weight"],
        "weight": tensors["input"],
        "grad_output": tensors["grad_output"].T,
    }
    roles: tuple[Role, ...] = ROLES[1:] if "bias" in tensors else ROLES
    run = OtherRun("input and weight exchanged", other, exchanged)
    return Variant(run, everything(spec), roles=roles, swapped=True)


def check_summed(evidence: Evidence) -> Iterator[Verdict]:
    """R10: grad_weight of two half batches adds up: exactly on the lattice with fp32 results, and
    within bound 3.3 of both halves elsewhere."""
    base, parts = base_of(evidence), halves(evidence.spec, evidence.plan, evidence.tensors)
    if base is None or not parts:
        yield plain("R10", evidence.base, "grad_weight", "not_applicable", "nothing to split")
        return
    gemm, dtype = evidence.plan.gemms["grad_weight"], evidence.spec.dtype
    exact = dtype == "fp32" and gemm.rounding == ("out",) and on_lattice(evidence, "grad_weight")
    total, lo, hi = np.zeros((3, evidence.spec.n, evidence.spec.k))
    skip = evidence.reference.may_overflow("grad_weight")
    for part in parts:
        after = again(evidence, part.run)
        if after is None:
            yield plain("R10", evidence.base, "grad_weight", "inconclusive", "the rerun failed")
            return
        theirs = evidence.promised(part.run.spec)
        half = single_reference(theirs, evidence.spec.dtype, dict(part.run.tensors))
        exact = exact and on_lattice(evidence, "grad_weight", work=half)
        centre, radius = half.layer("grad_weight")
        skip = skip | half.may_overflow("grad_weight") | ~np.isfinite(centre) | np.isnan(radius)
        ends = bounds.interval(centre, radius, gemm, dtype)
        with np.errstate(invalid="ignore"):
            total, lo, hi = total + after.outputs["grad_weight"], lo + ends[0], hi + ends[1]
    if exact:
        lo = hi = base.outputs["grad_weight"].astype(np.float64)
    if total.size and skip.all():
        yield plain(
            "R10", evidence.base, "grad_weight", "inconclusive", "every element may overflow"
        )
        return
    bad = ~(bounds.contains(lo, hi, total) | skip)
    verdict = _sum_verdict(
        evidence.base, total, lo, hi, bad, exact, tuple(part.run for part in parts)
    )
    if verdict.status == "ok" and not (bounds.excludes_zero(lo, hi) & ~skip).any():
        verdict = plain("R10", evidence.base, "grad_weight", "inconclusive", NOTHING)
    yield verdict


def _sum_verdict(
    arm: str, total: F64, lo: F64, hi: F64, bad: Any, exact: bool, runs: tuple[OtherRun, ...]
) -> Verdict:
    if not bad.any():
        return plain("R10", arm, "grad_weight", "ok")
    at = first(bad)
    symptom = "halves do not add up" if exact else "sum of halves leaves its bound"
    here = At(name="grad_weight", index=at, run=" + ".join(run.name for run in runs))
    actual, expect = number(total[at]), between(lo[at], hi[at])
    return diverged("R10", arm, "grad_weight", symptom, here, actual, expect, runs=runs)
