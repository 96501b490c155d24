"""Whose fault a difference of two runs is: what the state machine says of each of them."""

from __future__ import annotations

import numpy as np

from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import plain
from narrowfuzz.rules.state.machine import check_machine
from narrowfuzz.trace.verdict import Verdict


def blamed(verdict: Verdict, one: Evidence, other: Evidence, *, alike: bool) -> Verdict:
    """A difference of two runs, each alone in its evidence, that is owed to another cause: the
    first breaks the state machine's rules, or a deviation is followed: where the runs had the same
    events and are ``alike``, by one of them only."""
    followed: list[set[tuple[str, str]]] = []
    for run in (one, other):
        found = list(check_machine(run))
        followed.append({(v.explained_by, v.why) for v in found if v.status == "known"})
        if not any(v.status == "diverged" for v in found):
            continue
        if run is one:
            reason = "the plain run breaks the state machine's rules"
            return plain(verdict.rule, verdict.arm, verdict.role, "inconclusive", reason)
        return verdict  # of this no deviation accounts, whatever was followed besides
    if not alike and verdict.role != "state" and _scales(one) == _scales(other):
        return verdict  # deviations change scales, and through them results
    entries = sorted(followed[0] ^ followed[1] if alike else followed[0] | followed[1])
    return verdict.known(entries[0][0]) if entries else verdict


def _scales(evidence: Evidence) -> list[tuple[str, bytes]]:
    """What each tensor was quantised with, in order."""
    return [
        (str(cast.slot), np.float32(cast.scale).tobytes())
        for trace in evidence.in_one_process.values()
        for moment in trace.moments
        for cast in moment.casts
        if cast.scale is not None
    ]
