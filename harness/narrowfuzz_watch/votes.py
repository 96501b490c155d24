"""Compares ranks that should hold or do the same: which rank has other bits, which waits for which,
and where their sequences of collectives differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from narrowfuzz_watch.records import Collective, Rank, Vote


def votes(records: Sequence[Rank], before: int | None) -> tuple[Vote, ...]:
    """The first disagreement of each group of ranks; with ``before``, only in steps before it."""
    found: dict[tuple[int, ...], Vote] = {}
    for step, what, group, digests in sorted(_ballots(records), key=lambda b: (b[0], b[1])):
        open_ = group not in found and (before is None or step < before)
        if open_ and set(digests) == set(group) and len({*digests.values()}) > 1:
            found[group] = Vote(what=what, step=step, group=group, sick=_minority(digests))
    return tuple(found.values())


def _minority(digests: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks without the majority's digest; empty if no digest has a majority."""
    (most, count), *_ = Counter(digests.values()).most_common()
    if 2 * count <= len(digests):
        return ()
    return tuple(sorted(rank for rank, digest in digests.items() if digest != most))


def _ballots(records: Sequence[Rank]) -> Iterator[tuple[int, str, tuple[int, ...], dict[int, int]]]:
    """(step, what is compared, group, rank -> digest) for all that a group should hold alike."""
    held: dict[tuple[int, str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for rank in records:
        for after in rank.held:
            for name, group, digest in after.held:
                held[after.step, f"{name} after the step", group][rank.rank] = digest
    for (step, what, group), digests in held.items():
        yield step, what, group, digests
    for parts in _met(records).values():
        votes = [part for part in parts if part.digest is not None and part.left]
        alike = len({part.op for part in votes}) == 1
        replicates = votes and votes[0].op.startswith(_REPLICATES)
        if alike and replicates:
            first = votes[0]
            what = f"what {first.op} {first.seq} gave"
            yield first.step, what, first.group, {p.rank: p.digest or 0 for p in votes}


_REPLICATES = ("allreduce", "all_reduce", "allgather", "all_gather", "broadcast")


def _met(records: Sequence[Rank]) -> dict[tuple[tuple[int, ...], int], list[Collective]]:
    met: dict[tuple[tuple[int, ...], int], list[Collective]] = defaultdict(list)
    for rank in records:
        for part in rank.collectives:
            if part.group:  # without a known group, the parts of a collective cannot be matched
                met[part.key].append(part)
    return met


def collective_mismatch(records: Sequence[Rank]) -> str:
    """A sentence on the first collective in which ranks did different things; "" if none did."""
    for (group, seq), parts in sorted(_met(records).items(), key=lambda m: (m[1][0].step, m[0])):
        called = {part.rank: _in_words(part) for part in parts}
        if len(group) == 2 and parts[0].op in ("send", "recv"):
            continue
        if len({*called.values()}) > 1:
            each = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(called.items()))
            return f"ranks {list(group)} do not do the same in their collective {seq}: {each}"
    return ""


def _in_words(part: Collective) -> str:
    sized = part.op.startswith(("allreduce", "all_reduce", "reduce_scatter"))
    size = f" of {part.numel} {part.dtype}" if sized else ""
    where = f", layer {part.layer}" if part.layer else ""
    return f"{part.op}{size} (step {part.step}, {part.during or 'outside'}{where})"


def stuck(records: Sequence[Rank]) -> tuple[str, ...]:
    """Sentences: which ranks wait in which collective, and which never entered it."""
    lines = [line] if (line := collective_mismatch(records)) else []
    last = {rank.rank: max(rank.collectives, key=lambda p: p.n, default=None) for rank in records}
    for rank, part in sorted(last.items()):
        if part is None or part.left:
            continue
        came = {p.rank for r in records for p in r.collectives if p.key == part.key}
        absent = [other for other in part.group if other not in came]
        line = f"rank {rank} has not left {_in_words(part)}, collective {part.seq} of ranks "
        line += f"{list(part.group)}"
        if absent:
            line += f"; {', '.join(_last(other, last) for other in absent)}"
        lines.append(line)
    return tuple(lines)


def _last(rank: int, last: Mapping[int, Collective | None]) -> str:
    part = last.get(rank)
    if part is None:
        return f"rank {rank} never entered it"
    where = f"{part.op} {part.seq} of ranks {list(part.group)}"
    return f"rank {rank} never entered it: its last was {where}"
