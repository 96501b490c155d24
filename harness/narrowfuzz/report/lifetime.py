"""A finding's life over many runs: when it was first and last seen, with which versions and on
which machines, and whether it is fixed or came back. It is stored as a table of events in SQLite,
or in another database given by its URL; ``run``, ``replay`` and ``bisect`` add events, ``list
findings`` reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sql
from narrowfuzz_watch.folder import home
from packaging.version import InvalidVersion, Version
from sqlalchemy.exc import SQLAlchemyError

from narrowfuzz.ledger.severity import SEVERITIES
from narrowfuzz.machine.environment import describe
from narrowfuzz.machine.gpu import ask
from narrowfuzz.report.lookup import OnDisk
from narrowfuzz.report.store import Store

#: ``seen``: the finding showed itself. ``gone``: its case or script ran and did not show it.
Kind = Literal["seen", "gone"]
#: Packages whose versions do not matter for a finding.
_TOOLS = frozenset({"python", "numpy", "hypothesis", "narrowfuzz"})
#: Name of the default database, a file in the folder that holds the folders of runs.
NAME = "all-findings.db"
#: ``reopened``: seen again after it was gone, with versions not older than those it was gone with.
#: ``suspected``: no script has ever reproduced it.
State = Literal["open", "reopened", "fixed", "suspected"]
STATES: tuple[State, ...] = ("reopened", "open", "suspected", "fixed")

_TABLE = sql.Table(
    "finding_events",
    sql.MetaData(),
    sql.Column("number", sql.Integer, primary_key=True),
    sql.Column("at", sql.DateTime(timezone=True), nullable=False),
    sql.Column("kind", sql.String(8), nullable=False),
    sql.Column("fingerprint", sql.Text, nullable=False, index=True),
    sql.Column("finding", sql.String(12), nullable=False),
    sql.Column("suspected", sql.Boolean, nullable=False),
    sql.Column("severity", sql.String(8), nullable=False),
    sql.Column("recipe", sql.Text, nullable=False),
    sql.Column("arm", sql.Text, nullable=False),
    sql.Column("known_issue", sql.Text, nullable=False),
    sql.Column("sentence", sql.Text, nullable=False),
    sql.Column("versions", sql.JSON, nullable=False),
    sql.Column("machine", sql.Text, nullable=False),
    sql.Column("folder", sql.Text, nullable=False),
)


@dataclass(frozen=True)
class Event:
    """One row: at this time a finding showed itself, or did not."""

    at: datetime
    kind: Kind
    fingerprint: str
    #: The finding's id and folder, either of which ``replay`` accepts.
    finding: str
    folder: str
    suspected: bool
    severity: str
    recipe: str
    arm: str
    #: The id of the known issue that it is, "" for none.
    known_issue: str
    sentence: str
    #: Version of each installed package.
    versions: Mapping[str, str]
    #: The GPU, or the CPU's instruction sets.
    machine: str


@dataclass(frozen=True)
class Lifetime:
    """All events of one fingerprint, oldest first."""

    events: tuple[Event, ...]

    @property
    def seen(self) -> list[Event]:
        return [event for event in self.events if event.kind == "seen"]

    @property
    def last(self) -> Event:
        """Its last sighting, whose case is the one to replay."""
        return (self.seen or self.events)[-1]

    @property
    def state(self) -> State:
        if gone := self._fixed:
            after = [e for e in self.events[self.events.index(gone) :] if e.kind == "seen"]
            back = any(not _older(event.versions, gone.versions) for event in after)
            return "reopened" if back else "fixed"
        return "open" if any(not event.suspected for event in self.seen) else "suspected"

    @property
    def _fixed(self) -> Event | None:
        """The last ``gone`` event that proves a fix; None if there is none.

        The same machine must have shown the finding before, as another may never show it; and with
        versions that are not newer, as an older version may not have had the bug yet.
        """
        for place, event in reversed([*enumerate(self.events)]):
            before = [e for e in self.events[:place] if e.kind == "seen"]
            if event.kind == "gone" and any(
                one.machine == event.machine and not _older(event.versions, one.versions)
                for one in before
            ):
                return event
        return None

    def record(self) -> dict[str, Any]:
        """The fields that JSON and the table show; times in ISO 8601, UTC."""
        gone, last = self._fixed, self.last
        return {
            "id": last.finding,
            "fingerprint": last.fingerprint,
            "state": self.state,
            "severity": last.severity,
            "first_seen": _iso(self.seen or self.events, 0),
            "last_seen": _iso(self.seen or self.events, -1),
            "times_seen": len(self.seen),
            "fixed": gone.at.isoformat(timespec="seconds") if gone else "",
            "fixed_in": dict(gone.versions) if gone else {},
            "versions": _seen_with(self.seen),
            "machines": list(dict.fromkeys(event.machine for event in self.seen)),
            "recipe": last.recipe,
            "arm": last.arm,
            "known_issue": last.known_issue,
            "sentence": last.sentence,
            "folder": last.folder,
        }


def _event(found: OnDisk, kind: Kind, environment: Mapping[str, Any], device: str) -> Event:
    finding = found.finding
    return Event(
        at=datetime.now(UTC),
        kind=kind,
        fingerprint=finding.fingerprint,
        finding=finding.id,
        folder=str(found.folder.resolve()),
        suspected=bool(finding.why_suspected),
        severity=finding.severity,
        recipe=finding.recipe,
        arm=finding.arm,
        known_issue=finding.known_issue or "",
        sentence=finding.sentence,
        versions={n: v for n, v in environment.get("versions", {}).items() if v != "absent"},
        machine=_machine(environment, device),
    )


def record_run(database: Database, store: Store) -> list[str]:
    """Add a run's new and suspected findings; returns a sentence for each that had been fixed and
    came back. A resumed run adds only those that it had not found before."""
    folder = store.out / "findings"
    found = [*store.findings(), *store.suspected()]
    fixed = {life.last.fingerprint for life in database.lifetimes() if life.state == "fixed"}
    added = database.folders()
    events = [
        _event(OnDisk(one, folder / one.id), "seen", one.environment, one.device) for one in found
    ]
    events = [event for event in events if event.folder not in added]
    database.add(events)
    return [
        f"{life.last.finding} came back: it was gone on {life.record()['fixed'][:10]}"
        for life in database.lifetimes()
        if life.state == "reopened" and life.last.fingerprint in fixed
    ]


def record_now(database: Database, found: OnDisk, device: str, kind: Kind) -> None:
    """Add that a finding was seen, or was gone, in this process on this device."""
    database.add([*_missing(database, found), _event(found, kind, _here(device), device)])


def record_releases(
    database: Database,
    found: OnDisk,
    package: str,
    answers: Iterable[tuple[str, Kind]],
) -> None:
    """Add whether the finding's script showed it here with each of these releases of a package."""
    device = found.finding.device
    now = _event(found, "seen", _here(device), device)
    events = [
        replace(now, kind=kind, versions={**now.versions, package: version})
        for version, kind in answers
    ]
    database.add([*_missing(database, found), *events])


def _missing(database: Database, found: OnDisk) -> list[Event]:
    """The event that the finding's run saw it, if this database does not have it yet."""
    finding, script = found.finding, found.folder / "explain.json"
    event = _event(found, "seen", finding.environment, finding.device)
    if event.folder in database.folders():
        return []
    return [replace(event, at=datetime.fromtimestamp(script.stat().st_mtime, UTC))]


def _here(device: str) -> dict[str, Any]:
    gpus = asdict(ask()) if device.startswith("cuda") else {}
    return describe() | {"device": gpus}


def _machine(environment: Mapping[str, Any], device: str) -> str:
    """The names of the GPUs, or the CPU's instruction sets."""
    if device.startswith("cuda"):
        gpus = environment.get("device", {}).get("gpus", ())
        return ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus)) or device
    cpu = " ".join(environment.get("machine", {}).get("cpu", ())) or "unknown"
    return f"CPU: {cpu}" if device == "cpu" else f"{device} on CPU: {cpu}"


class Database:
    """The events of the findings of many runs."""

    @classmethod
    def of(cls, text: str, folder: Path | None) -> Database | None:
        """The database that a user named; else the default one, if the folder (of a run or of a
        finding) is inside narrowfuzz's own folder of runs; else None."""
        if text:
            return cls(text)
        here = home()
        inside = folder is not None and here.resolve() in folder.resolve().parents
        return cls(here / NAME) if inside else None

    def __init__(self, text: str | Path) -> None:
        """``text`` is a file, which is created if absent, or a database's URL. Raises ValueError if
        it cannot be opened."""
        self.text = str(text)
        url = self.text if "://" in self.text else f"sqlite:///{self.text}"
        try:
            if url.startswith("sqlite:///"):
                Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            self._engine = sql.create_engine(url)
            _TABLE.create(self._engine, checkfirst=True)
        except (SQLAlchemyError, ImportError, OSError) as error:
            raise self._cannot(error) from None

    @classmethod
    def existing(cls, text: str) -> Database | None:
        """The database to read: the one that a user named, else the default one; None if that does
        not exist yet. Raises ValueError if a named file does not exist."""
        if not text:
            return cls(file) if (file := home() / NAME).is_file() else None
        if "://" not in text and not Path(text).is_file():
            raise ValueError(f"--database {text} is no file: name one, or a database's URL")
        return cls(text)

    def add(self, events: Iterable[Event]) -> None:
        """Add all events in one transaction. Raises ValueError, and adds none, if that fails."""
        rows = [vars(event) | {"versions": dict(event.versions)} for event in events]
        try:
            with self._engine.begin() as connection:
                for row in rows:
                    connection.execute(_TABLE.insert(), row)
        except SQLAlchemyError as error:
            raise self._cannot(error) from None

    def lifetimes(self) -> list[Lifetime]:
        """One Lifetime per fingerprint, in the order of ``STATES`` (reopened first, fixed last),
        within a state the most severe first."""
        lives = [Lifetime(tuple(events)) for events in self._by_fingerprint()]
        return sorted(
            lives,
            key=lambda life: (
                STATES.index(life.state),
                SEVERITIES.index(life.last.severity),  # type: ignore[arg-type]
                life.last.fingerprint,
            ),
        )

    def folders(self) -> frozenset[str]:
        """The folders of all findings that have events."""
        return frozenset(row[0] for row in self._rows(sql.select(_TABLE.c.folder).distinct()))

    def _by_fingerprint(self) -> Iterator[Iterator[Event]]:
        columns = [column for column in _TABLE.columns if column.name != "number"]
        query = sql.select(*columns).order_by(_TABLE.c.fingerprint, _TABLE.c.number)
        rows = (row._mapping for row in self._rows(query))
        events = (Event(**{**row, "at": row["at"].replace(tzinfo=UTC)}) for row in rows)
        return (group for _, group in itertools.groupby(events, attrgetter("fingerprint")))

    def _rows(self, query: sql.Select[Any]) -> Sequence[sql.Row[Any]]:
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).all()
        except SQLAlchemyError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: Exception) -> ValueError:
        reason = str(error).splitlines()[0]
        hint = "; pip install the package" if isinstance(error, ImportError) else ""
        return ValueError(f"--database {_without_password(self.text)}: {reason}{hint}")


def _without_password(text: str) -> str:
    try:
        return sql.make_url(text).render_as_string() if "://" in text else text
    except SQLAlchemyError:
        return text.partition("://")[0] + "://..."


def _older(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """True if any package is older in ``one`` than in ``other``; ``_TOOLS`` do not matter."""
    return any(
        _version(one[name]) < _version(other[name]) for name in (one.keys() & other.keys()) - _TOOLS
    )


def _version(text: str) -> Version:
    try:
        return Version(Version(text).public)
    except InvalidVersion:  # a commit, which has no order
        return Version("0")


def _iso(events: Sequence[Event], place: int) -> str:
    return events[place].at.isoformat(timespec="seconds")


def _seen_with(events: Sequence[Event]) -> dict[str, list[str]]:
    """Library -> the versions with which the finding was seen, oldest first."""
    found: dict[str, set[str]] = {}
    for event in events:
        for name in event.versions.keys() - _TOOLS:
            version = event.versions[name]
            found.setdefault(name, set()).add(version)
    return {name: sorted(versions, key=_version) for name, versions in sorted(found.items())}
