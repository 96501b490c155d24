"""The cause of a difference between two runs, found by judging each with the state machine."""

from __future__ import annotations

import numpy as np

from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import plain
from narrowfuzz.rules.state.machine import check_machine
from narrowfuzz.trace.verdict import Verdict


def blamed(verdict: Verdict, one: Evidence, other: Evidence, *, alike: bool) -> Verdict:
    """The verdict on a difference between two runs, each the only one in its evidence, or what
    replaces it if the difference has another cause: inconclusive if the first run breaks the state
    machine's rules, known if a deviation was followed (if the runs are ``alike``, with the same
    events: by only one of them)."""
    followed: list[set[tuple[str, str]]] = []
    for run in (one, other):
        found = list(check_machine(run))
        followed.append({(v.explained_by, v.why) for v in found if v.status == "known"})
        if not any(v.status == "diverged" for v in found):
            continue
        if run is one:
            reason = "the plain run breaks the state machine's rules"
            return plain(verdict.rule, verdict.arm, verdict.role, "inconclusive", reason)
        return verdict  # no deviation explains this, whatever else was followed
    if not alike and verdict.role != "state" and _scales(one) == _scales(other):
        return verdict  # deviations change scales, and through them results
    entries = sorted(followed[0] ^ followed[1] if alike else followed[0] | followed[1])
    return verdict.known(entries[0][0]) if entries else verdict


def _scales(evidence: Evidence) -> list[tuple[str, bytes]]:
    """The scales with which tensors were quantised, in order."""
    return [
        (str(cast.slot), np.float32(cast.scale).tobytes())
        for trace in evidence.in_one_process.values()
        for moment in trace.moments
        for cast in moment.casts
        if cast.scale is not None
    ]
