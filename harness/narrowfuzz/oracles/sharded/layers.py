"""S3 (operands of the whole) and S5 (products over ranks), call by call of each linear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from narrowfuzz.address import At
from narrowfuzz.arm import EAGER
from narrowfuzz.expect import Same, Within, bits
from narrowfuzz.numerics import bounds
from narrowfuzz.numerics.formats import F32, FORMATS, Format, canonical, round_to
from narrowfuzz.numerics.plan import ROLES, Role
from narrowfuzz.numerics.reduction import added
from narrowfuzz.numerics.reference import Undivided
from narrowfuzz.oracles.evidence import Evidence, identical, same_bits
from narrowfuzz.oracles.gemm import NOTHING, centre_and_radius, observed
from narrowfuzz.oracles.layers import layer_evidence
from narrowfuzz.oracles.oracle import first, number, plain
from narrowfuzz.oracles.sharded.evidence import ShardedEvidence, calls, joined, origin
from narrowfuzz.trace import LayerCall, Seen, Trace
from narrowfuzz.verdict import Verdict

#: What each GEMM's two operands are made of.
_MADE_OF: dict[Role, tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
_SIDES: tuple[Literal["a", "b"], ...] = ("a", "b")
#: The GEMM whose sums are cut over the ranks that share a linear.
_CUT: dict[str, Role] = {"colwise": "grad_input", "rowwise": "output"}


def check_operands(evidence: ShardedEvidence) -> Iterator[Verdict]:
    """S3: where ranks multiply pieces of a tensor, codes and scales are those of the whole tensor
    in one process: a scale's maximum is the largest of all pieces."""
    arm, run = evidence.arm, evidence.sharded
    if run is None:
        return
    seen = False
    for rank, alone, group in evidence.groups():
        for call, parts in calls(alone, group, evidence.first_step[0]):
            for verdict in _operands(evidence, rank, call, parts):
                seen = True
                yield verdict
    if not seen:
        why = "nothing is quantised" if not evidence.whole.plan.quantised else "not tapped"
        yield plain("S3", arm, "operand", "not_applicable", why)


def _operands(
    evidence: ShardedEvidence, rank: int, call: LayerCall, parts: Sequence[LayerCall]
) -> Iterator[Verdict]:
    arm = evidence.arm
    for site in call.sites:
        others = [next((s for s in p.sites if s.site == site.site), None) for p in parts]
        for side, source in zip(_SIDES, _MADE_OF[site.site.role], strict=True):
            if any(other is None for other in others):
                yield plain("S3", arm, "operand", "inconclusive", "a rank's product was not seen")
            elif not _same_source(call, parts, source):
                why = "what is quantised differs, or is not whole"
                yield plain("S3", arm, "operand", "inconclusive", why)
            else:
                at = At(
                    layer=call.module, call=call.index, phase=site.site.phase, side=side,
                    name=site.site.role, rank=rank,
                )  # fmt: skip
                fmt = getattr(evidence.whole.plan.gemms[site.site.role], side).format
                pieces = [getattr(other, side) for other in others]
                yield _same_seen(arm, at, getattr(site, side), pieces, fmt)


def _same_source(call: LayerCall, parts: Sequence[LayerCall], source: str) -> bool:
    want = call.tensors.get(source)
    pieces = [part.tensors.get(source) for part in parts]
    if want is None:
        return False
    if source == "weight" and all(piece is None for piece in pieces):
        return True  # its codes were gathered, and the case gives what they were made of
    if any(piece is None for piece in pieces):
        return False
    whole = joined(pieces, want.shape, call.batch)
    return whole is not None and (identical(whole, want) or bool(same_bits(whole, want).all()))


def _same_seen(arm: str, at: At, want: Seen, pieces: Sequence[Seen], fmt: Format | None) -> Verdict:
    for what in ("scale", "codes", "values"):
        expected, parts = getattr(want, what), [getattr(piece, what) for piece in pieces]
        if expected is None or any(part is None for part in parts):
            continue
        if what == "codes" and fmt is not None:
            expected, *parts = (canonical(codes, fmt) for codes in (expected, *parts))
        verdict = _same_part(arm, at, what, expected, parts)
        if verdict is not None:
            return verdict
    return plain("S3", arm, "operand", "ok")


def _same_part(arm: str, at: At, what: Any, want: Any, parts: Sequence[Any]) -> Verdict | None:
    """Each rank's copy, or all pieces together, against one process's; None if they are equal."""
    expected = np.atleast_1d(np.asarray(want))
    pieces = [np.atleast_1d(np.asarray(part)) for part in parts]
    if all(piece.size == expected.size for piece in pieces):
        found = [([piece.reshape(expected.shape)], i) for i, piece in enumerate(pieces)]
    else:
        whole = joined(pieces, expected.shape)
        if whole is None:
            return Verdict(
                "S3", arm, "operand", "diverged", f"{what} of another shape", at,
                f"pieces {[list(piece.shape) for piece in pieces]}",
                Same(_there(at, what, ())),
            )  # fmt: skip
        found = [(pieces, 0)]
    for held, rank in found:
        got = joined(held, expected.shape)
        bad = ~same_bits(got, expected)
        if bad.any():
            where = first(bad)
            piece, inside = origin(held, expected.shape, where)
            place = _at(at, what, inside if np.ndim(parts[0]) else (), rank + piece)
            return Verdict(
                "S3", arm, "operand", "diverged", f"{what} differs from the whole's", place,
                number(got[where]),
                Same(_there(at, what, where if np.ndim(want) else ()), number(expected[where])),
            )  # fmt: skip
    return None


def _at(at: At, what: Any, index: tuple[int, ...], rank: int) -> At:
    return msgspec.structs.replace(at, what=what, index=index, rank=at.rank + rank)


def _there(at: At, what: Any, index: tuple[int, ...]) -> At:
    return msgspec.structs.replace(at, what=what, index=index, run=EAGER.name)


def parts_of_calls(evidence: ShardedEvidence) -> Iterator[tuple[At, Evidence]]:
    """Each rank's part of each call of a shared linear as a linear of its own, without the results
    that are sums over ranks."""
    for rank, alone, group in _shared(evidence):
        for call, parts in calls(alone, group, len(evidence.spec.training)):
            for i, part in enumerate(_as_linears(evidence, call, parts)):
                if part is not None and _divides(evidence, part):
                    own = replace(part, outputs=dict(part.outputs))
                    own.outputs.pop(_CUT[evidence.styles[call.module]], None)
                    at = At(layer=call.module, call=call.index, rank=rank + i)
                    yield at, layer_evidence(evidence.whole, evidence.arm, own)


def check_products(evidence: ShardedEvidence) -> Iterator[Verdict]:
    """S5: a product whose sums are cut over ranks lies in the interval of the sum of what each rank
    may get from the operands that it multiplies, rounded by each and added in any order."""
    if evidence.sharded is None:
        return
    if evidence.sharding.tensor < 1:
        yield plain("S5", evidence.arm, "output", "not_applicable", "no linear is shared")
        return
    for rank, alone, group in _shared(evidence):
        for call, parts in calls(alone, group, len(evidence.spec.training)):
            own = _as_linears(evidence, call, parts)
            role = _CUT[evidence.styles[call.module]]
            if any(part is None for part in own):
                yield plain("S5", evidence.arm, role, "inconclusive", "pieces make up no whole")
                continue
            if not all(_divides(evidence, part) for part in own if part is not None):
                why = "a block reaches over ranks"
                yield plain("S5", evidence.arm, role, "inconclusive", why)
                continue
            # tensors of this run: after a step they are others than one process has
            bias = parts[0].tensors.get("bias") if role == "output" else None
            linears = [part for part in own if part is not None]
            yield _product(evidence, rank, role, call, linears, bias)


def _shared(evidence: ShardedEvidence) -> Iterator[tuple[int, Trace, tuple[Trace, ...]]]:
    if evidence.sharding.tensor >= 1:
        yield from evidence.groups()


def _divides(evidence: ShardedEvidence, part: LayerCall) -> bool:
    """Has the plan whole blocks for what this rank holds? Where it has not, ranks gather them."""
    linear = layer_evidence(evidence.whole, evidence.arm, part)
    try:
        for role in ROLES[: 3 if "grad_output" in part.tensors else 1]:
            for side in ("a", "b"):
                linear.reference.operand(role, side)
    except Undivided:
        return False
    return True


def _as_linears(
    evidence: ShardedEvidence, call: LayerCall, parts: Sequence[LayerCall]
) -> list[LayerCall | None]:
    """What each rank multiplies: of what the ranks share the whole, its own piece of the rest. None
    where that is not seen."""
    style = evidence.styles.get(call.module, "")
    shared = {"colwise": ("input",), "rowwise": ("grad_output",)}.get(style, ())
    found: list[LayerCall | None] = []
    for part in parts:
        tensors = dict(part.tensors)
        if style == "rowwise":
            tensors.pop("bias", None)  # it belongs to the sum
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


def _product(
    evidence: ShardedEvidence,
    rank: int,
    role: Role,
    call: LayerCall,
    own: Sequence[LayerCall],
    bias: F32 | None,
) -> Verdict:
    arm, ends, sums, unsure = evidence.arm, [], [], np.zeros((), dtype=bool)
    rounds = True
    want = call.outputs.get(role)
    got_parts = [part.outputs.get(role) for part in own]
    if want is None or any(part is None for part in got_parts):
        return plain("S5", arm, role, "not_applicable")
    got = joined(got_parts, want.shape, call.batch)
    if got is None:
        return plain("S5", arm, role, "inconclusive", "pieces make up no whole")
    fmt = FORMATS[call.dtype]
    for part in own:
        linear = layer_evidence(evidence.whole, arm, part)
        a, b = observed(linear, linear.traces[arm], role)
        if a is None or b is None:
            return plain("S5", arm, role, "inconclusive", part.unobserved or "not tapped")
        centre, radius = centre_and_radius(linear, role, a, b)
        gemm = linear.plan.gemms[role]
        rounds = gemm.kernel_rounds
        ends.append(bounds.interval(centre, radius, gemm, linear.spec.dtype))
        sums.append((centre - radius, centre + radius))
        unsure = unsure | linear.reference.may_overflow(role) | np.isnan(centre)
    more = 0.0 if bias is None else np.broadcast_to(bias.astype(np.float64), want.shape)
    lo, hi = added(ends, fmt, more)
    # what the kernel does not round, a rank may bring as it is, with the bias already added
    if not rounds or bias is not None:
        low, high = added(sums, FORMATS["fp32"], more)
        low, high = round_to(np.stack([low, high]), fmt, overflow="ieee")
        lo, hi = np.minimum(lo, low), np.maximum(hi, high)
    bad = ~bounds.contains(lo, hi, got) & ~unsure & np.isfinite(lo) & np.isfinite(hi)
    if bad.any():
        where = first(bad)
        symptom = "is not the ranks' sum" if np.isfinite(got[where]) else "not finite"
        piece, inside = origin(got_parts, want.shape, where, call.batch)
        return Verdict(
            "S5", arm, role, "diverged", symptom,
            At(name=role, index=inside, layer=call.module, call=call.index, rank=rank + piece),
            number(got[where]), Within(bits(lo[where]), bits(hi[where])),
        )  # fmt: skip
    told = bool((bounds.excludes_zero(lo, hi) & ~unsure).any())
    return plain("S5", arm, role, "ok" if told else "inconclusive", "" if told else NOTHING)
