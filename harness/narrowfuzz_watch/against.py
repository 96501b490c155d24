"""Finds where two runs of one training, both recorded in full, first diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import msgspec

from narrowfuzz_watch.address import At, AtPhase
from narrowfuzz_watch.records import Collective, Consequence, FirstBad, Op, Rank

#: Records with digests of what was read and of what came out, and with their place.
Seen = Op | Collective


def divergence(records: Sequence[Rank], earlier: Sequence[Rank]) -> FirstBad | None:
    """The first operator or collective whose digests differ from the earlier run; None if there is
    none. A collective that only received other numbers is a consequence of another rank's
    divergence. Raises ValueError if a run was not recorded in full."""
    for what, run in (("this run", records), ("--against", earlier)):
        if not any(rank.ops for rank in run):
            raise ValueError(f"{what} has no digests: record it with --full")
    before = {rank.rank: rank for rank in earlier}
    diverging = [
        (rank.rank, *found)
        for rank in records
        if rank.rank in before and (found := _first(rank, before[rank.rank])) is not None
    ]
    made = [p for p in diverging if not isinstance(p[1], Collective) or _sent_otherwise(p[1], p[2])]
    if not diverging:
        return None
    own = sorted(made or diverging, key=lambda p: (_step(p[1]), _time(p[1])))
    rank, new, old = own[0]
    consequences = [
        Consequence(rank=r, op=n.op, group=n.group, seq=n.seq, step=n.step)
        for r, n, _ in diverging
        if r != rank and isinstance(n, Collective)
    ]
    return _first_bad(new, old, consequences, [r for r, *_ in own[1:]])


def alike(run: Sequence[Rank], other: Sequence[Rank]) -> bool:
    """True if ``run`` was recorded in full, and each rank ran the same number of operators and
    collectives in both runs."""

    def lengths(ranks: Sequence[Rank]) -> list[tuple[int, int]]:
        return sorted((rank.rank, len(_sequence(rank))) for rank in ranks)

    return any(rank.ops for rank in run) and lengths(run) == lengths(other)


def minority_divergence(runs: Mapping[int, Sequence[Rank]]) -> FirstBad | None:
    """Where a minority of several runs of one training (number -> records) diverges; None if all
    runs are equal.

    Runs without a divergence between them form a group. Compared are the first run of a smallest
    group and the first run of a largest one; the reason names the first, and states whether there
    is a majority.
    """
    groups: list[list[int]] = []
    for number, run in runs.items():
        for group in groups:
            if divergence(run, runs[group[0]]) is None:
                group.append(number)
                break
        else:
            groups.append([number])
    if len(groups) == 1:
        return None
    groups.sort(key=len)
    most, sick = groups[-1], groups[0][0]
    found = divergence(runs[sick], runs[most[0]])
    assert found is not None
    words = f"run {sick} of {len(runs)}; {len(most)} others made the same numbers"
    if len(most) == len(groups[-2]):
        words = f"run {sick} of {len(runs)}; no majority of runs tells which of them is wrong"
    return msgspec.structs.replace(found, because=f"{found.because}; {words}")


def _step(seen: Seen) -> int:
    return seen.step


def _time(seen: Seen) -> float:
    return seen.time if isinstance(seen, Op) else 0.0


def _sequence(rank: Rank) -> list[Seen]:
    parts: list[Seen] = [*rank.ops, *(p for p in rank.collectives if p.digest is not None)]
    return sorted(parts, key=lambda part: part.n)


def _first(rank: Rank, earlier: Rank) -> tuple[Seen, Seen | None] | None:
    for new, old in zip_longest(_sequence(rank), _sequence(earlier)):
        if new is None:
            return None  # the earlier run went on for longer
        if old is None:
            return None
        if _what(new) != _what(old) or new.digest != old.digest or _read(new) != _read(old):
            return new, old
    return None


def _what(seen: Seen) -> tuple[object, ...]:
    where = seen.phase if isinstance(seen, Op) else seen.during
    return seen.op, seen.layer, where, seen.step


def _read(seen: Seen) -> int | None:
    return seen.read if isinstance(seen, Op) else seen.sent


def _sent_otherwise(new: Seen, old: Seen | None) -> bool:
    return old is None or _read(new) != _read(old)


def _first_bad(
    new: Seen, old: Seen | None, consequences: list[Consequence], also: list[int]
) -> FirstBad:
    assert old is not None
    phase = new.phase if isinstance(new, Op) else "collective"
    place = At(
        rank=new.rank,
        event=new.step,
        layer=new.layer,
        phase=msgspec.convert(phase, AtPhase),
        name=new.op,
    )
    words = FirstBad(
        at=place,
        bad="differs",
        made="made",
        also=tuple(also),
        consequences=tuple(consequences),
        through=consequences[0] if consequences else None,
    )
    if _what(new) != _what(old):
        because = f"the earlier run did {old.op} there: the two programs are not the same"
        return msgspec.structs.replace(words, cause="software or data", because=because)
    if _read(new) != _read(old):
        because = "it read other numbers, which no operator that was seen had made"
        return msgspec.structs.replace(words, made="given", cause="data", because=because)
    because = "of the same operands, bit for bit, it made other numbers than in the earlier run"
    return msgspec.structs.replace(words, cause="hardware or race", because=because)
