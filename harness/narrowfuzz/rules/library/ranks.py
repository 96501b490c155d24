"""A library's layers on ranks: the maxima that a group shares, and the results that stay each
rank's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.equal_runs import same
from narrowfuzz.rules.rule import plain
from narrowfuzz.rules.state.machine import judged
from narrowfuzz.trace.snapshots import CastSeen, Moment, SlotName
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

#: The name of a rank's run in one process in addresses.
BY_ITSELF = "in one process"


def check_shared(evidence: Evidence) -> Iterator[Verdict]:
    """S13: on every rank the state machine (O14) holds, where an update takes the largest of the
    maxima that the ranks of its group have staged; so ranks that share maxima have one scale."""
    for arm, trace in evidence.on_ranks.items():
        if evidence.own_layers.kind != "delayed" or trace.error is not None:
            yield plain("S13", arm, "state", "not_applicable")
        elif not any(moment.casts for own in trace.ranks for moment in own.moments):
            yield plain("S13", arm, "state", "inconclusive", "no cast was seen")
        elif not _alike(trace.ranks):
            yield plain("S13", arm, "state", "inconclusive", "ranks quantise other tensors")
        else:
            yield from _shared(evidence, arm)


def _shared(evidence: Evidence, arm: str) -> Iterator[Verdict]:
    """The first divergence of each class on any rank."""
    classes: set[str] = set()
    for rank, own in enumerate(as_shared(evidence, arm)):
        for verdict in judged(evidence, own):
            if verdict.status == "diverged" and verdict.symptom not in classes:
                classes.add(verdict.symptom)
                at = msgspec.structs.replace(verdict.at, rank=rank)
                yield replace(verdict, rule="S13", at=at)
    if not classes:
        yield plain("S13", arm, "state", "ok")


def check_alone(evidence: Evidence) -> Iterator[Verdict]:
    """S1: a rank that shares no maxima gives the bits that it gives in one process."""
    for arm, trace in evidence.on_ranks.items():
        if trace.error is not None or evidence.own_layers.alone is None or shares(evidence):
            yield plain("S1", arm, "output", "not_applicable")
            continue
        for rank, own in enumerate(trace.ranks):
            by_itself = evidence.own_layers.alone(arm, rank)
            if by_itself.error is not None:
                yield plain("S1", arm, "output", "inconclusive", "the run in one process failed")
                return
            events = range(len(by_itself.moments))
            verdict = same(evidence, "S1", arm, by_itself, own, events, BY_ITSELF)
            if verdict.status == "diverged" or rank + 1 == len(trace.ranks):
                at = msgspec.structs.replace(verdict.at, rank=rank)
                yield replace(verdict, at=at) if verdict.status == "diverged" else verdict
                break


def shares(evidence: Evidence) -> bool:
    """Do several ranks share maxima?"""
    return evidence.spec.sharding.ranks > 1 and evidence.spec.settings.reduces == "all"


def as_shared(evidence: Evidence, arm: str) -> tuple[Trace, ...]:
    """Each rank's trace, in which each maximum that its group shares, of casts and of staged state,
    is replaced by the largest of all ranks."""
    ranks = evidence.on_ranks[arm].ranks
    if not shares(evidence):
        return ranks
    found: list[list[Moment]] = [[] for _ in ranks]
    for moments in zip(*(own.moments for own in ranks), strict=True):
        casts = [_largest(some) for some in zip(*(m.casts for m in moments), strict=True)]
        staged = _staged(moments)
        for own, moment in zip(found, moments, strict=True):
            seen = zip(moment.casts, casts, strict=True)
            own.append(
                replace(
                    moment,
                    casts=tuple(replace(cast, amax=amax) for cast, amax in seen),
                    state={n: _with(slot, staged[n]) for n, slot in moment.state.items()},
                )
            )
    return tuple(
        replace(own, moments=tuple(moments)) for own, moments in zip(ranks, found, strict=True)
    )


def _alike(ranks: Sequence[Trace]) -> bool:
    """Do all of them quantise the same tensors?"""
    casts = [[[cast.slot for cast in m.casts] for m in own.moments] for own in ranks]
    return all(one == casts[0] for one in casts)


def _largest(casts: Sequence[CastSeen]) -> np.float32:
    return np.float32(np.fmax.reduce([cast.amax for cast in casts]))


def _staged(moments: Sequence[Moment]) -> dict[SlotName, np.float32]:
    """Slot -> the largest maximum that any rank has staged."""
    found: dict[SlotName, np.float32] = {}
    for moment in moments:
        for name, slot in moment.state.items():
            found[name] = np.fmax(found.get(name, slot.window[0]), slot.window[0])
    return found


def _with(slot: Slot, staged: np.float32) -> Slot:
    window = slot.window.copy()
    window[0] = staged
    return replace(slot, window=window)
