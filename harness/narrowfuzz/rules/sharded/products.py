"""S5: products that are summed over ranks, and each rank's part of a linear as its own linear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from narrowfuzz.case.arm import EAGER
from narrowfuzz.numerics import bounds
from narrowfuzz.numerics.formats import F32, FORMATS, round_to
from narrowfuzz.numerics.plan import ROLES, Role
from narrowfuzz.numerics.reduction import sum_interval
from narrowfuzz.numerics.reference import Undivided
from narrowfuzz.operators.operator import Expected
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.expected import outside, passed
from narrowfuzz.rules.gemm import centre_and_radius, observed, rescaled
from narrowfuzz.rules.layers import layer_evidence
from narrowfuzz.rules.rule import diverged, first, plain
from narrowfuzz.rules.sharded.evidence import (
    arm_of,
    calls,
    first_step,
    groups,
    joined,
    origin,
    run_of,
    weight_pieces,
)
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import between, number
from narrowfuzz.trace.trace import LayerCall, Trace
from narrowfuzz.trace.verdict import Verdict

#: Style of a shared linear -> the GEMM whose sums are split over its ranks.
_CUT: dict[str, Role] = {"colwise": "grad_input", "rowwise": "output"}


def parts_of_calls(evidence: Evidence) -> Iterator[tuple[At, Evidence]]:
    """Yields place and evidence of each rank's part of each call of a shared linear, as a linear of
    its own without the results that are sums over ranks."""
    for rank, single, group in _shared(evidence):
        for call, parts in calls(single, group, len(evidence.spec.training)):
            for i, part in enumerate(_as_linears(evidence, call, _weighed(evidence, call, parts))):
                if part is not None and _divides(evidence, part):
                    own = replace(part, outputs=dict(part.outputs))
                    own.outputs.pop(_CUT[evidence.styles[call.module]], None)
                    at = At(layer=call.module, call=call.index, rank=rank + i)
                    yield at, layer_evidence(evidence, arm_of(evidence), own)


def check_products(evidence: Evidence) -> Iterator[Verdict]:
    """S5: a product whose sums are split over ranks lies in the interval of the sum of what each
    rank may get from the operands that it multiplies, rounded by each and added in any order."""
    if run_of(evidence) is None:
        return
    if evidence.spec.sharding.tensor < 1 or not evidence.styles:
        yield plain("S5", arm_of(evidence), "output", "not_applicable", "no linear is shared")
        return
    for rank, single, group in _shared(evidence):
        for call, parts in calls(single, group, len(evidence.spec.training)):
            own = _as_linears(evidence, call, _weighed(evidence, call, parts))
            role = _CUT[evidence.styles[call.module]]
            if any(part is None for part in own):
                yield plain("S5", arm_of(evidence), role, "inconclusive", "pieces make up no whole")
                continue
            if not all(_divides(evidence, part) for part in own if part is not None):
                why = "a block reaches over ranks"
                yield plain("S5", arm_of(evidence), role, "inconclusive", why)
                continue
            # the bias of this run, since after a step it differs from that in one process
            bias = parts[0].tensors.get("bias") if role == "output" else None
            linears = [part for part in own if part is not None]
            yield _product(evidence, rank, role, call, linears, bias)


def _shared(evidence: Evidence) -> Iterator[tuple[int, Trace, tuple[Trace, ...]]]:
    shared = evidence.spec.sharding.tensor >= 1 and evidence.styles
    if run_of(evidence) is not None and shared:
        yield from groups(evidence)


def _divides(evidence: Evidence, part: LayerCall) -> bool:
    """Do the plan's blocks divide this rank's part? If not, ranks gather the blocks."""
    linear = layer_evidence(evidence, arm_of(evidence), part)
    try:
        for role in ROLES[: 3 if "grad_output" in part.tensors else 1]:
            for side in ("a", "b"):
                linear.reference.operand(role, side)
    except Undivided:
        return False
    return True


def _weighed(
    evidence: Evidence, call: LayerCall, parts: Sequence[LayerCall]
) -> Sequence[LayerCall]:
    """The calls with each rank's piece of the weight. If ranks gather codes, none of them has its
    piece; before the first step it is that of the case's weight."""
    pieces = weight_pieces(evidence, call, len(parts))
    given = pieces and call.forward < first_step(evidence)[0]
    if not given or any("weight" in part.tensors for part in parts):
        return parts
    return [
        replace(part, tensors={**part.tensors, "weight": piece})
        for part, piece in zip(parts, pieces, strict=True)
    ]


def _as_linears(
    evidence: Evidence, call: LayerCall, parts: Sequence[LayerCall]
) -> list[LayerCall | None]:
    """Each rank's part as a linear of its own, with the whole of the tensor that all ranks of this
    style multiply and the rank's piece of the others. None if that was not observed."""
    style = evidence.styles.get(call.module, "")
    shared = {"colwise": ("input",), "rowwise": ("grad_output",)}.get(style, ())
    found: list[LayerCall | None] = []
    for part in parts:
        tensors = dict(part.tensors)
        if style == "rowwise":
            tensors.pop("bias", None)  # it is added to the sum over ranks
        for name in shared:
            if name not in call.tensors:
                continue
            pieces = [other.tensors.get(name) for other in parts]
            whole = None
            if all(piece is not None for piece in pieces):
                whole = joined(pieces, call.tensors[name].shape, call.batch)
            if whole is None:
                break
            tensors[name] = whole
        else:
            known = style and "weight" in tensors
            found.append(replace(part, tensors=tensors, batch=call.batch) if known else None)
            continue
        found.append(None)
    return found


def _rescaled(linear: Evidence, role: Role) -> Any:
    """True where the product of both inverse scales may overflow, False if the reference does not
    follow that deviation."""
    may = rescaled(linear, role)
    return False if may is None else may


def _product(
    evidence: Evidence,
    rank: int,
    role: Role,
    call: LayerCall,
    own: Sequence[LayerCall],
    bias: F32 | None,
) -> Verdict:
    arm, ends, sums, rounds = arm_of(evidence), [], [], True
    unsure = excused = np.zeros((), dtype=bool)
    want = call.outputs.get(role)
    got_parts = [part.outputs.get(role) for part in own]
    if want is None or any(part is None for part in got_parts):
        return plain("S5", arm, role, "not_applicable")
    got = joined(got_parts, want.shape, call.batch)
    if got is None:
        return plain("S5", arm, role, "inconclusive", "pieces make up no whole")
    fmt = FORMATS[call.dtype]
    for part in own:
        linear = layer_evidence(evidence, arm, part)
        a, b = observed(linear, linear.traces[arm], role)
        if a is None or b is None:
            return plain("S5", arm, role, "inconclusive", part.unobserved or "not tapped")
        centre, radius = centre_and_radius(linear, role, a, b)
        gemm = linear.plan.gemms[role]
        rounds = gemm.kernel_rounds
        ends.append(bounds.interval(centre, radius, gemm, linear.spec.dtype))
        with np.errstate(invalid="ignore"):  # both may be infinite
            sums.append((centre - radius, centre + radius))
        unsure = unsure | linear.reference.may_overflow(role) | np.isnan(centre)
        excused = excused | _rescaled(linear, role)
    # the scale of the whole weight is smaller than that of this rank's piece would be
    excused = excused | _rescaled(layer_evidence(evidence, EAGER.name, call), role)
    more = 0.0 if bias is None else np.broadcast_to(bias.astype(np.float64), want.shape)
    lo, hi = sum_interval(ends, fmt, more)
    # a rank may contribute a sum that its kernel did not round, with the bias already added
    if not rounds or bias is not None:
        low, high = sum_interval(sums, FORMATS["fp32"], more)
        low, high = round_to(np.stack([low, high]), fmt, overflow="ieee")
        lo, hi = np.minimum(lo, low), np.maximum(hi, high)
    may = Expected.between(lo, hi, unsure | ~(np.isfinite(lo) & np.isfinite(hi)))
    bad = outside(may, got)
    if bad.any() and not (bad & ~excused).any():
        entry = evidence.deviations["rescale_overflow"]
        return plain("S5", arm, role, "ok").known(entry)
    if bad.any():
        where = first(bad)
        symptom = "is not the ranks' sum" if np.isfinite(got[where]) else "not finite"
        piece, inside = origin(got_parts, want.shape, where, call.batch)
        at = At(name=role, index=inside, layer=call.module, call=call.index, rank=rank + piece)
        actual, expect = number(got[where]), between(lo[where], hi[where])
        return diverged("S5", arm, role, symptom, at, actual, expect)
    return passed("S5", arm, role, may)
