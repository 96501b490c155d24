"""Findings that do not make a run fail: those of an earlier run, and those that a user accepts.

They are found, stored and shown like all others, but do not count for the exit code.
"""

from __future__ import annotations

import datetime
import fnmatch
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from narrowfuzz.ledger.exits import FailOn, fails
from narrowfuzz.triage.finding import Finding

#: How the sentence about an entry begins that matched no finding.
IDLE = "accepted, but not seen in this run: "


class Suppression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a file of accepted findings."""

    #: Glob of fingerprints.
    fingerprint: str
    reason: str
    #: From this day on the finding counts again.
    until: datetime.date


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    suppress: tuple[Suppression, ...]


@dataclass(frozen=True)
class Changed:
    """Fingerprints seen only in this run, in both runs, and only in the baseline."""

    new: tuple[str, ...]
    both: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True)
class Accepted:
    """Fingerprints of the baseline, and the suppressions that are valid today."""

    #: None: there is no baseline.
    baseline: frozenset[str] | None = None
    suppressions: tuple[Suppression, ...] = ()
    #: Suppressions whose ``until`` date has been reached.
    expired: tuple[Suppression, ...] = ()
    #: Findings less severe than this do not count.
    least: FailOn = "suspected"

    def why(self, finding: Finding) -> str:
        """Why the finding does not count; "" if it counts."""
        if finding.fingerprint in (self.baseline or ()):
            return "in the baseline"
        for one in self.suppressions:
            if _fits(one, finding):
                return f"accepted until {one.until}: {one.reason}"
        if not fails([finding.severity], 0, self.least):
            return f"{finding.severity}, and --fail-on is {self.least}"
        return ""

    def counting(self, findings: Iterable[Finding]) -> list[Finding]:
        """The findings that count for the exit code."""
        return [finding for finding in findings if not self.why(finding)]

    def changed(self, seen: Iterable[str]) -> Changed | None:
        """How a run that has ``seen`` these fingerprints differs from the baseline; None without a
        baseline."""
        if self.baseline is None:
            return None
        now = frozenset(seen)
        parts = now - self.baseline, now & self.baseline, self.baseline - now
        return Changed(*(tuple(sorted(part)) for part in parts))

    def stale(self, seen: Collection[Finding]) -> list[str]:
        """Sentences about entries of the file that the user should review: those that have expired,
        and those that match none of the findings ``seen``."""
        over = [f"no longer accepted since {o.until}: {o.fingerprint}" for o in self.expired]
        idle = [o for o in self.suppressions if not any(_fits(o, finding) for finding in seen)]
        return over + [f"{IDLE}{o.fingerprint}" for o in idle]


def accepted(
    baselines: Sequence[Path], file: Path | None, today: datetime.date, least: FailOn = "suspected"
) -> Accepted:
    """The findings that these baselines and this file of suppressions accept. Raises ValueError for
    a baseline that is not a run's folder, and for a file that is not valid or lacks a reason."""
    entries = suppressions(file) if file else ()
    seen = [name for run in baselines for name in _fingerprints(run)]
    return Accepted(
        frozenset(seen) if baselines else None,
        tuple(one for one in entries if one.until > today),
        tuple(one for one in entries if one.until <= today),
        least,
    )


def _fits(one: Suppression, finding: Finding) -> bool:
    return fnmatch.fnmatchcase(finding.fingerprint, one.fingerprint)


def _fingerprints(run: Path) -> frozenset[str]:
    """The fingerprints of all that a run has seen, whether suspected or reproduced."""
    database = run / "findings.db"
    if not database.is_file():
        raise ValueError(f"--baseline {run}: no run is there, for it has no findings.db")
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
            return frozenset(row[0] for row in db.execute("select fingerprint from findings"))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"--baseline {run}: {error}") from None


def suppressions(file: Path) -> tuple[Suppression, ...]:
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
