"""S3: ranks multiply the operands of the whole tensors, judged for each call of each linear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from narrowfuzz.case.arm import EAGER
from narrowfuzz.numerics.formats import Format, canonical
from narrowfuzz.numerics.plan import Role
from narrowfuzz.rules.evidence import Evidence, identical, same_bits
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
from narrowfuzz.trace.expect import Same, number
from narrowfuzz.trace.trace import LayerCall, Seen
from narrowfuzz.trace.verdict import Verdict

#: GEMM -> the tensors of which its two operands are made.
_MADE_OF: dict[Role, tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
_SIDES: tuple[Literal["a", "b"], ...] = ("a", "b")


def check_operands(evidence: Evidence) -> Iterator[Verdict]:
    """S3: where ranks multiply pieces of a tensor, codes and scales are those of the whole tensor
    in one process: a scale's maximum is the largest of all pieces."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    seen = False
    for rank, single, group in groups(evidence):
        for call, parts in calls(single, group, first_step(evidence)[0]):
            for verdict in _operands(evidence, rank, call, parts):
                seen = True
                yield verdict
    if not seen:
        why = "nothing is quantised" if not evidence.plan.quantised else "not tapped"
        yield plain("S3", arm, "operand", "not_applicable", why)


def _operands(
    evidence: Evidence, rank: int, call: LayerCall, parts: Sequence[LayerCall]
) -> Iterator[Verdict]:
    arm = arm_of(evidence)
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
                    layer=call.module,
                    call=call.index,
                    phase=site.site.phase,
                    side=side,
                    name=site.site.role,
                    rank=rank,
                )
                fmt = getattr(evidence.plan.gemms[site.site.role], side).format
                pieces = [getattr(other, side) for other in others]
                verdict = _same_seen(arm, at, getattr(site, side), pieces, fmt)
                if verdict.status == "diverged" and source == "weight":
                    verdict = _scaled_apart(evidence, verdict, call, parts, pieces)
                yield verdict


def _same_source(call: LayerCall, parts: Sequence[LayerCall], source: str) -> bool:
    want = call.tensors.get(source)
    pieces = [part.tensors.get(source) for part in parts]
    if want is None:
        return False
    if source == "weight" and all(piece is None for piece in pieces):
        return True  # its codes were gathered, and the case has the weight they were made of
    if any(piece is None for piece in pieces):
        return False
    whole = joined(pieces, want.shape, call.batch)
    if whole is None:
        return False
    # -0 and +0 have codes of their own
    signs = (np.signbit(whole) == np.signbit(want)) | (whole != 0.0)
    return identical(whole, want) or bool((same_bits(whole, want) & signs).all())


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


def _scaled_apart(
    evidence: Evidence,
    verdict: Verdict,
    call: LayerCall,
    parts: Sequence[LayerCall],
    pieces: Sequence[Seen],
) -> Verdict:
    """The divergence, marked as known if every rank's codes and scale are those of its own piece of
    the weight and the reference follows that deviation."""
    entry = evidence.deviations.get("shards_scaled_apart")
    weights = weight_pieces(evidence, call, len(parts))
    if not entry or not weights:
        return verdict
    for part, weight, seen in zip(parts, weights, pieces, strict=True):
        own = replace(part, tensors={**part.tensors, "weight": weight})
        linear = layer_evidence(evidence, arm_of(evidence), own)
        operand = linear.reference.operand("output", "b")
        planned = operand.quantised
        if planned is None or seen.codes is None or seen.scale is None:
            return verdict
        fmt = operand.plan.format
        assert fmt is not None
        codes = seen.codes if seen.codes.shape == planned.codes.shape else seen.codes.T
        if not same_bits(np.asarray(seen.scale).reshape(planned.scale.shape), planned.scale).all():
            return verdict
        if not identical(canonical(codes, fmt), canonical(planned.codes, fmt)):
            return verdict
    return verdict.known(entry)


def _same_part(arm: str, at: At, what: Any, want: Any, parts: Sequence[Any]) -> Verdict | None:
    """Compares each rank's copy, or all pieces together, with one process's; None if equal."""
    expected = np.atleast_1d(np.asarray(want))
    pieces = [np.atleast_1d(np.asarray(part)) for part in parts]
    if all(piece.size == expected.size for piece in pieces):
        found = [([piece.reshape(expected.shape)], i) for i, piece in enumerate(pieces)]
    else:
        whole = joined(pieces, expected.shape)
        if whole is None:
            actual = f"pieces {[list(piece.shape) for piece in pieces]}"
            expect = Same(_there(at, what, ()))
            return diverged("S3", arm, "operand", f"{what} of another shape", at, actual, expect)
        found = [(pieces, 0)]
    for held, rank in found:
        got = joined(held, expected.shape)
        bad = ~same_bits(got, expected)
        if bad.any():
            where = first(bad)
            piece, inside = origin(held, expected.shape, where)
            place = _at(at, what, inside if np.ndim(parts[0]) else (), rank + piece)
            than = _there(at, what, where if np.ndim(want) else ())
            actual, expect = number(got[where]), Same(than, number(expected[where]))
            symptom = f"{what} differs from the whole's"
            return diverged("S3", arm, "operand", symptom, place, actual, expect)
    return None


def _at(at: At, what: Any, index: tuple[int, ...], rank: int) -> At:
    return msgspec.structs.replace(at, what=what, index=index, rank=at.rank + rank)


def _there(at: At, what: Any, index: tuple[int, ...]) -> At:
    return msgspec.structs.replace(at, what=what, index=index, run=EAGER.name)
