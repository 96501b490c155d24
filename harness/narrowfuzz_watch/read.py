"""Reads the records that ranks have written to a run's folder, and makes the report of them."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from narrowfuzz_watch.against import divergence
from narrowfuzz_watch.folder import new_folder
from narrowfuzz_watch.merge import first_bad, first_nan
from narrowfuzz_watch.records import (
    Collective,
    Event,
    Held,
    Loss,
    Op,
    Rank,
    Reached,
    Report,
    Scaler,
    Tally,
)
from narrowfuzz_watch.votes import stuck, votes

#: In a run's folder: the folder of the ranks' records, and the report.
RECORDS, REPORT = "ranks", "first_bad.json"

_KINDS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "event": ("events", Event),
    "collective": ("collectives", Collective),
    "op": ("ops", Op),
    "reached": ("reached", Reached),
    "held": ("held", Held),
    "scaler": ("scaled", Scaler),
    "loss": ("losses", Loss),
}


def prepared(out: Path | None, *, fresh: bool = True) -> Path:
    """Create the folder of a run's records; a default one if ``out`` is None. Raises ValueError if
    it is a file or, if it is to be ``fresh``, if it has records of an earlier run."""
    folder = new_folder() if out is None else out
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: name a folder")
    if fresh and (folder / RECORDS).exists():
        raise ValueError(f"--out {folder} holds an earlier run: name another folder")
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    return folder


def read(folder: Path) -> list[Rank]:
    """All records of a run. Raises ValueError if the folder holds none."""
    records = folder / RECORDS
    if not records.is_dir():
        raise ValueError(f"{folder} is no run of narrowfuzz watch: it has no folder {RECORDS}/")
    found = [_rank(file) for file in sorted(records.glob("*.jsonl"))]
    for file in sorted(records.glob("*.ring")):
        rank = next((rank for rank in found if rank.source == file.stem), None)
        if rank is None:
            rank = Rank(rank=0, source=file.stem)
            found.append(rank)
        _add_ring(rank, _lines(file))
    return sorted(found, key=lambda rank: (rank.rank, rank.source))


def _rank(file: Path) -> Rank:
    rank = Rank(rank=0, source=file.stem)
    for line in _lines(file):
        # the rank may be unknown until torch.distributed is initialised
        rank.rank = line.get("rank", rank.rank)
        kind = line.pop("kind")
        if kind == "tally":
            rank.tally = msgspec.convert(line, Tally)
        else:
            name, type = _KINDS[kind]
            getattr(rank, name).append(msgspec.convert(line, type))
    return rank


def _add_ring(rank: Rank, lines: Iterable[dict[str, Any]]) -> None:
    """Add the last collectives from the ring, except those that ``rank`` has already: a collective
    that was left is usually among the lines, too."""
    there = {part.n for part in rank.collectives}
    for line in lines:
        part = msgspec.convert(line, Collective)
        rank.rank = part.rank
        if part.n not in there:
            rank.collectives.append(part)
    rank.collectives.sort(key=lambda part: part.n)


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    for line in file.read_bytes().splitlines():
        text = line.strip(b" \0")
        if text.endswith(b"}"):  # skip a line that is cut off, as its process died
            yield json.loads(text)


def reported(folder: Path, earlier: Path | None = None, exit_code: int | None = None) -> Report:
    """Make the report of a run, and write it to the run's folder."""
    records = read(folder)
    report = report_of(records, None if earlier is None else read(earlier), exit_code)
    write(folder, report)
    return report


def report_of(
    records: Sequence[Rank], earlier: Sequence[Rank] | None, exit_code: int | None
) -> Report:
    """The report on these records."""
    first = first_bad(records)
    tallies = [rank.tally for rank in records if rank.tally is not None]
    seconds = sum(tally.seconds for tally in tallies)
    checked = sum(tally.checked for tally in tallies)
    report = Report(
        exit_code=exit_code,
        trained=any(tally.backward > 0 or tally.step > 0 for tally in tallies),
        ranks=tuple(sorted({rank.rank for rank in records})),
        steps=max((tally.step for tally in tallies), default=0),
        operators=checked,
        looked=checked,
        overhead=sum(tally.own_seconds for tally in tallies) / seconds if seconds else 0.0,
        votes=votes(records, first[0].at.event if first is not None and first[1] else None),
        stuck=stuck(records) if exit_code != 0 else (),
    )
    if first is not None:
        report.first, report.counts = first
        report.first_nan = first_nan(records, report.first)
    report.loss_nan = min((loss.step for rank in records for loss in rank.losses), default=None)
    if earlier is not None and report.trained:
        report.divergence = divergence(records, earlier)
    report.notes = tuple(_notes(records))
    return report


def _notes(records: Sequence[Rank]) -> Iterable[str]:
    sources: dict[int, set[str]] = defaultdict(set)
    for rank in records:
        if rank.collectives:
            sources[rank.rank].add(rank.source.partition("-")[0])
    if twice := sorted(rank for rank, pids in sources.items() if len(pids) > 1):
        yield f"ranks {twice} were started more than once: a restart, or several trainings"


def write(folder: Path, report: Report) -> None:
    """Write first_bad.json atomically."""
    partial = folder / f"{REPORT}.{os.getpid()}-{threading.get_ident()}"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    partial.replace(folder / REPORT)
