"""O2 of a library's layers: tensors are quantised to the codes and scales of the definition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowfuzz.numerics.delayed import FMAX
from narrowfuzz.numerics.scales import current_scale
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import address_of
from narrowfuzz.rules.rule import diverged, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, bits
from narrowfuzz.trace.snapshots import CastSeen, Wrong
from narrowfuzz.trace.verdict import Verdict


def check_casts(evidence: Evidence) -> Iterator[Verdict]:
    """O2: codes are the saturating cast of the tensor times its scale; a scale that is not kept as
    state is computed from its own tensor or block."""
    for arm, trace in evidence.in_one_process.items():
        found = plain("O2", arm, "operand", "not_applicable")
        for event, cast in ((m.event, c) for m in trace.moments for c in m.casts):
            wrong = _wrong(evidence.own_layers.kind, cast)
            if wrong is not None:
                kind = evidence.own_layers.kind
                # fingerprints of FP8 in blocks call a wrong scale codes, too, and stay as they are
                part = "codes" if kind in ("mx", "block") else wrong.what
                byte = kind == "mx" and wrong.what == "scale"
                at = address_of(At(what=wrong.what, index=wrong.place), event, cast.at)
                symptom, expect = f"{cast.format} {part}", Is(bits(wrong.want), byte=byte)
                found = diverged("O2", arm, "operand", symptom, at, number(wrong.got), expect)
                break
            found = plain("O2", arm, "operand", "ok")
        yield found


def _wrong(kind: str, cast: CastSeen) -> Wrong | None:
    """The first code or scale of a cast that differs from the expected cast; None if none does."""
    if kind == "current" and cast.scale is not None:
        right = current_scale(np.asarray(cast.amax), float(FMAX[cast.format]))
        if cast.scale != right:
            return Wrong("scale", (), float(cast.scale), float(right))
    return cast.wrong
