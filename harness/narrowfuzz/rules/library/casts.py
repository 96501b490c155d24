"""O2 of a library's layers: tensors are quantised to the codes and scales of the definition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowfuzz.numerics.delayed import FMAX
from narrowfuzz.numerics.formats import FORMATS, Format
from narrowfuzz.numerics.scales import current_scale
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import address_of
from narrowfuzz.rules.rule import diverged, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, Own, Within, between, bits
from narrowfuzz.trace.snapshots import CastSeen, OneWay, Wrong
from narrowfuzz.trace.verdict import Verdict


def check_casts(evidence: Evidence) -> Iterator[Verdict]:
    """O2: codes are the saturating cast of the tensor times its scale, or one of the two neighbours
    where the recipe rounds gradients stochastically, and then by no rule; a scale that is not kept
    as state is computed from its own tensor or block."""
    entry = evidence.deviations.get("amax_before_rounding", "")
    for arm, trace in evidence.in_one_process.items():
        found = plain("O2", arm, "operand", "not_applicable")
        for event, cast in ((m.event, c) for m in trace.moments for c in m.casts):
            wrong = _wrong_scale(evidence.own_layers.kind, cast)
            if wrong is not None and entry and _before_rounding(cast, FORMATS[evidence.spec.dtype]):
                found, wrong = found.known(entry), None
            wrong = wrong or cast.wrong
            if wrong is not None:
                symptom, at, actual, expect = _described(evidence.own_layers.kind, cast, wrong)
                place = address_of(at, event, cast.at)
                found = diverged("O2", arm, "operand", symptom, place, actual, expect)
                break
            if found.status != "known":
                found = plain("O2", arm, "operand", "ok")
        yield found


def _described(
    kind: str, cast: CastSeen, wrong: Wrong | OneWay
) -> tuple[str, At, str, Is | Within | Own]:
    """Symptom, place, what is there and what must be there."""
    if isinstance(wrong, OneWay):
        actual = f"all {wrong.rounded} elements between two codes rounded {wrong.way}"
        return f"{cast.format} rounding", At(what="codes"), actual, Own("either code, by chance")
    # fingerprints of FP8 in blocks call a wrong scale codes, too, and stay as they are
    part = "codes" if kind in ("mx", "block") else wrong.what
    expect: Is | Within = Is(bits(wrong.want), byte=kind == "mx" and wrong.what == "scale")
    if wrong.other is not None:
        expect = between(wrong.want, wrong.other)
    at = At(what=wrong.what, index=wrong.place)
    return f"{cast.format} {part}", at, number(wrong.got), expect


def _wrong_scale(kind: str, cast: CastSeen) -> Wrong | OneWay | None:
    """The scale of a tensor that is not computed from the tensor; None if nothing is wrong."""
    if kind == "current" and cast.scale is not None:
        right = current_scale(np.asarray(cast.amax), float(FMAX[cast.format]))
        if cast.scale != right:
            return Wrong("scale", (), float(cast.scale), float(right))
    return None


def _before_rounding(cast: CastSeen, dtype: Format) -> bool:
    """Is the scale that of a largest magnitude which rounds to the tensor's?"""
    assert cast.scale is not None
    least = 2.0 ** (dtype.emin - dtype.mantissa_bits)
    step = max(2.0 ** (23 - dtype.mantissa_bits) * float(np.spacing(cast.amax)), least)
    ends = (cast.amax + np.float32(step / 2), cast.amax - np.float32(step / 2))
    low, high = (current_scale(np.asarray(end), float(FMAX[cast.format])) for end in ends)
    return bool(low <= cast.scale <= high)
