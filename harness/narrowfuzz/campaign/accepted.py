"""What makes no run fail: findings that an earlier run had as well, and those a user accepts.

They are found, kept and shown like all others; they do not count for the exit code.
"""

from __future__ import annotations

import datetime
import fnmatch
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from narrowfuzz.triage.finding import Finding


class Suppression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a file of accepted findings."""

    #: Glob of fingerprints.
    fingerprint: str
    reason: str
    #: From this day on it counts again.
    until: datetime.date


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    suppress: tuple[Suppression, ...]


@dataclass(frozen=True)
class Changed:
    """Fingerprints of this run alone, of both runs, and of the baseline alone."""

    new: tuple[str, ...]
    both: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True)
class Accepted:
    """Fingerprints of the baseline, and what a user accepts today."""

    #: None: there is no baseline.
    baseline: frozenset[str] | None = None
    suppressions: tuple[Suppression, ...] = ()

    def why(self, finding: Finding) -> str:
        """Why the finding does not count, "" where it does."""
        if finding.fingerprint in (self.baseline or ()):
            return "in the baseline"
        for one in self.suppressions:
            if fnmatch.fnmatchcase(finding.fingerprint, one.fingerprint):
                return f"accepted until {one.until}: {one.reason}"
        return ""

    def counting(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those that count."""
        return [finding for finding in findings if not self.why(finding)]

    def changed(self, seen: Iterable[str]) -> Changed | None:
        """What is other than in the baseline in a run that has ``seen`` these fingerprints; None
        where there is no baseline."""
        if self.baseline is None:
            return None
        now = frozenset(seen)
        parts = now - self.baseline, now & self.baseline, self.baseline - now
        return Changed(*(tuple(sorted(part)) for part in parts))


def accepted(baseline: Path | None, file: Path | None, today: datetime.date) -> Accepted:
    """What these two accept. Raises ValueError for a baseline that is no run, and for a file that
    is not valid or gives no reason."""
    return Accepted(
        _fingerprints(baseline) if baseline else None,
        tuple(one for one in _suppressions(file) if one.until > today) if file else (),
    )


def _fingerprints(run: Path) -> frozenset[str]:
    """Of everything that a run has seen, suspected or shown."""
    database = run / "findings.db"
    if not database.is_file():
        raise ValueError(f"--baseline {run}: no run is there, for it has no findings.db")
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
            return frozenset(row[0] for row in db.execute("select fingerprint from findings"))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"--baseline {run}: {error}") from None


def _suppressions(file: Path) -> tuple[Suppression, ...]:
    try:
        found = msgspec.toml.decode(file.read_bytes(), type=_File).suppress
    except OSError as error:
        raise ValueError(f"--suppress {file}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"--suppress {file}: {error}") from None
    for one in found:
        if not one.reason.strip():
            raise ValueError(f"--suppress {file}: {one.fingerprint} has no reason")
    return found
