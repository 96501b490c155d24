"""The findings of one run on disk: a SQLite table, a folder per finding, claims between workers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from narrowfuzz.case.spec import Case, dump_case, load_case
from narrowfuzz.ledger.severity import SEVERITIES
from narrowfuzz.triage.finding import Finding
from narrowfuzz.triage.picture import draw_state

#: How a finding counts: as new, as another sighting of a new one, or as suspected only.
Status = Literal["new", "sighting", "suspected"]

_SCHEMA = """
create table if not exists findings (
    id text primary key, fingerprint text, severity text, status text, recipe text,
    oracle text, arm text, role text, symptom text, sentence text, reach text, flake text,
    case_id text, minimal_id text, why_suspected text, sighting_of text,
    found_at text default current_timestamp
)
"""
#: Takes the fields of a finding, and the values that ``Store.add`` adds to them.
_KEEP = """
insert or replace into findings (
    id, fingerprint, severity, status, recipe, oracle, arm, role, symptom, sentence, reach, flake,
    case_id, minimal_id, why_suspected, sighting_of
) values (
    :id, :fingerprint, :severity, :status, :recipe, :oracle, :arm, :role, :symptom, :sentence,
    :reach, :flake, :case_id, :minimal_id, :why_suspected, :sighting_of
)
"""


class Store:
    """One output folder. Only the supervisor writes to the database."""

    def __init__(self, out: Path) -> None:
        """Raises ValueError if ``out`` is not a folder that can be created and written to."""
        self.out = out
        try:
            for folder in ("findings", "claims", "journal"):
                (out / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot write to {out}: {error.strerror}") from None
        try:
            with self._database() as db:
                db.execute(_SCHEMA)
                db.execute("create table if not exists runs (started_at text)")
        except sqlite3.DatabaseError as error:
            raise ValueError(f"cannot write to {out / 'findings.db'}: {error}") from None

    def begin(self) -> int:
        """Record that a run starts in this folder; returns the number of earlier runs."""
        with self._database() as db:
            (runs,) = db.execute("select count(*) from runs").fetchone()
            db.execute("insert into runs values (current_timestamp)")
        return int(runs)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all its changes are committed, or none."""
        with closing(sqlite3.connect(self.out / "findings.db")) as db, db:
            yield db

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with self._database() as db:
            return db.execute(query, values).fetchall()

    def add(self, finding: Finding, script: str) -> Status:
        """Store a finding, and return how it counts: as new, as one more sighting of a cause that
        was found before, or as suspected, if no script reproduces it. Nothing is ever dropped."""
        cause = self._cause_of(finding)
        status: Status = "suspected" if finding.why_suspected else "sighting" if cause else "new"
        folder = self.out / "findings" / finding.id
        folder.mkdir(exist_ok=True)
        if (folder / "explain.json").is_file():  # a flaky finding may have several symptoms
            both = [*load_finding(folder).seen_as, *finding.seen_as]
            finding = msgspec.structs.replace(finding, seen_as=list(dict.fromkeys(both)))
        (folder / "case.json").write_bytes(dump_case(finding.minimal))
        (folder / "repro.py").write_text(script)
        raw = msgspec.json.format(msgspec.json.encode(finding), indent=2)
        (folder / "explain.json").write_bytes(raw)
        if finding.story is not None and finding.story.slot:
            draw_state(finding.story, folder / "state.svg")
        row = msgspec.structs.asdict(finding)
        row |= {"case_id": finding.case.id, "minimal_id": finding.minimal.id}
        row |= {"status": status, "sighting_of": cause}
        with self._database() as db:
            db.execute(_KEEP, row)
            if status != "suspected":  # earlier cases that were only suspected are confirmed now
                db.execute(
                    "update findings set status = 'sighting', sighting_of = ? "
                    "where status = 'suspected' and fingerprint = ?",
                    (cause or finding.id, finding.fingerprint),
                )
        if status == "new":
            self._gather(finding)
        return status

    def replace(self, name: str, finding: Finding, script: str) -> Status:
        """Store a finding in place of the one with id ``name``, of which it is a smaller case."""
        status = self.add(finding, script)
        if name != finding.id:
            cause = self._cause_of(finding) or finding.id
            with self._database() as db:
                db.execute("delete from findings where id = ?", (name,))
                db.execute(
                    "update findings set sighting_of = ? where sighting_of = ?", (cause, name)
                )
            shutil.rmtree(self.out / "findings" / name)
        return status

    def _cause_of(self, finding: Finding) -> str:
        """The new finding that this one is a sighting of; "" if there is none."""
        others = (other for other in self.findings() if other.id != finding.id)
        return next((other.id for other in others if same_cause(finding, other)), "")

    def _gather(self, finding: Finding) -> None:
        """Turn earlier new findings with the same cause, which need more than this one, into
        sightings of it."""
        others = [o for o in self.findings() if o.id != finding.id and same_cause(o, finding)]
        with self._database() as db:
            for other in others:
                db.execute(
                    "update findings set status = 'sighting', sighting_of = ? "
                    "where id = ? or sighting_of = ?",
                    (finding.id, other.id, other.id),
                )

    def add_sighting(self, finding_id: str, case: Case) -> None:
        """Store one more case of a finding that already has its minimal case."""
        (self.out / "findings" / finding_id / f"also-{case.id}.json").write_bytes(dump_case(case))

    def sightings(self, finding_id: str) -> list[Finding]:
        """The other findings that are sightings of this finding's cause."""
        ids = self._rows("select id from findings where sighting_of = ?", finding_id)
        return [one for one in self.findings("sighting") if (one.id,) in ids]

    def findings(self, status: Status = "new") -> list[Finding]:
        """Stored findings, most severe first. Each is as severe as its severest sighting, except
        for known issues, which have a severity of their own."""
        seen = self._rows("select sighting_of, severity from findings")
        loaded = []
        for (name,) in self._rows("select id from findings where status = ?", status):
            finding = load_finding(self.out / "findings" / name)
            severities = [finding.severity, *(how for of, how in seen if of == name)]
            most = min(severities, key=SEVERITIES.index)
            if most != finding.severity and not finding.known_issue:
                finding.severity, finding.why_severity = most, "that of its severest sighting"
            loaded.append(finding)
        return sorted(loaded, key=lambda f: (SEVERITIES.index(f.severity), f.fingerprint))

    def fingerprints(self) -> frozenset[str]:
        """The fingerprints of all findings, whatever their status."""
        return frozenset(name for (name,) in self._rows("select fingerprint from findings"))

    def suspected(self) -> list[Finding]:
        """One suspected finding per fingerprint."""
        return list({f.fingerprint: f for f in self.findings("suspected")}.values())

    def write_json(self, name: str, value: Any) -> None:
        (self.out / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def same_cause(finding: Finding, other: Finding) -> bool:
    """True if ``finding`` is a sighting of ``other``.

    That is so if both are the same known issue. Otherwise both must have the same recipe and arm,
    must not be different known issues (nor one a known issue and the other none), and ``other``
    must need something. Then ``finding`` needs the same; or it breaks the same rule in the same
    role, and needs all that ``other`` needs and more.
    """
    if finding.known_issue and finding.known_issue == other.known_issue:
        return True
    if not other.needs or (finding.recipe, finding.arm) != (other.recipe, other.arm):
        return False
    issues = {finding.known_issue, other.known_issue} - {None}  # None: not compared yet
    if len(issues) > 1:
        return False
    alike = (finding.rule, finding.role) == (other.rule, other.role)
    needs, least = set(finding.needs), set(other.needs)
    return needs == least or (alike and needs > least)


def load_finding(folder: Path) -> Finding:
    """Read one finding's folder. Raises ValueError if it is not one."""
    try:
        fields = msgspec.json.decode((folder / "explain.json").read_bytes())
        cases = {name: _case(fields[name]) for name in ("case", "minimal") if name in fields}
        finding = msgspec.convert(fields | cases, Finding)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} is not a finding: {error}") from None
    return finding


def _case(fields: Any) -> Any:
    """A case of any schema version, converted to plain data of the current one."""
    return msgspec.to_builtins(load_case(msgspec.json.encode(fields)))


#: The most cases that are triaged for a fingerprint until a script reproduces it, per dtype and in
#: total: one case may reproduce it where another cannot, and in another dtype something else may be
#: wrong at the same place.
_TRIES, _TRIES_IN_ALL = 3, 6


def claim(out: Path, fingerprint: str, dtype: str = "") -> bool:
    """True for the one worker that may triage this fingerprint on a case of this dtype."""
    if _tried(out, fingerprint, dtype) >= _TRIES or _tried(out, fingerprint) >= _TRIES_IN_ALL:
        return False
    try:
        os.close(os.open(_claim(out, fingerprint), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def release(out: Path, fingerprint: str, dtype: str = "") -> None:
    """Free a claim after a case whose script did not reproduce the divergence, so that another case
    may be triaged, unless enough were tried."""
    path, tried = _claim(out, fingerprint), _tried(out, fingerprint)
    path.rename(path.with_name(f"{path.name}.{tried}.{dtype or 'any'}"))


def _tried(out: Path, fingerprint: str, dtype: str = "*") -> int:
    path = _claim(out, fingerprint)
    return len(list(path.parent.glob(f"{path.name}.*.{dtype or 'any'}")))


def _claim(out: Path, fingerprint: str) -> Path:
    return out / "claims" / hashlib.sha256(fingerprint.encode()).hexdigest()
