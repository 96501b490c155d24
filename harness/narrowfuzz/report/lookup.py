"""Finds the case or finding that a user names by a case file, a finding's folder, or an id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowfuzz.case.spec import Case, load_case

if TYPE_CHECKING:
    from narrowfuzz.triage.finding import Finding

_ROOTS = (Path("reports/runs"), Path("narrowfuzz-runs"))


@dataclass(frozen=True)
class OnDisk:
    """A finding, and the folder of a run that it was read from."""

    finding: Finding
    folder: Path


def lookup(target: str) -> OnDisk | Case:
    """The finding or case that a user names. Raises ValueError if ``target`` is neither a case file
    nor a finding's folder nor the beginning of exactly one finding's id, or if the file is invalid.
    """
    path = Path(target)
    if os.path.isdir(path):  # not Path.is_dir: that raises for a name too long to be one
        return _found(path)
    if os.path.isfile(path):
        return load_case(path.read_bytes())
    hits = [p for root in _ROOTS for p in root.glob(f"*/findings/{_plain(target)}*") if p.is_dir()]
    if not hits:
        raise ValueError(
            f"{target!r} is no case file, no finding's folder and no finding's id in "
            f"{_ROOTS[0]} or {_ROOTS[1]}: name the finding's folder"
        )
    if len(hits) > 1:
        places = ", ".join(str(p) for p in sorted(hits))
        raise ValueError(f"{target!r} fits several findings, name one's folder: {places}")
    return _found(hits[0])


def _found(folder: Path) -> OnDisk:
    from narrowfuzz.report.store import load_finding

    return OnDisk(load_finding(folder), folder)


def _plain(name: str) -> str:
    return "".join(c for c in name if c.isalnum()) or "?" * 64
