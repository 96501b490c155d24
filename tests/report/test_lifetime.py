"""When a finding counts as open, fixed or back, and where that is recorded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.report.lifetime import Database, Event, Lifetime, record_run
from narrowfuzz.report.store import Store
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.finding import Finding
from narrowfuzz.triage.session import SessionOptions, open_session
from narrowfuzz.triage.triage import unconfirmed

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
SEEN = Event(
    at=NOON,
    kind="seen",
    fingerprint="O5--output--eager--wrong value--torchao.float8",
    finding="0123456789ab",
    folder="/runs/1/findings/0123456789ab",
    suspected=False,
    severity="high",
    recipe="torchao.float8.rowwise",
    arm="eager",
    known_issue="",
    sentence="output is wrong",
    versions={"torch": "2.13.0+cpu", "torchao": "0.17.0", "python": "3.12.1"},
    machine="CPU: avx512_f",
)
GONE = replace(SEEN, kind="gone")


def of(event: Event, torchao: str, **changed: str) -> Event:
    return replace(event, versions={**event.versions, "torchao": torchao}, **changed)  # type: ignore[arg-type]


def life(*events: Event) -> Lifetime:
    return Lifetime(
        tuple(replace(e, at=NOON + timedelta(hours=hour)) for hour, e in enumerate(events))
    )


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([SEEN], "open"),
        ([SEEN, SEEN], "open"),
        ([replace(SEEN, suspected=True)], "suspected"),
        ([replace(SEEN, suspected=True), SEEN], "open"),
        ([SEEN, GONE], "fixed"),
        ([SEEN, of(GONE, "0.18.0")], "fixed"),
        # with an older release it was not there yet
        ([SEEN, of(GONE, "0.16.0")], "open"),
        # another machine may never have shown it
        ([SEEN, of(GONE, "0.18.0", machine="CPU: avx2")], "open"),
        ([SEEN, of(GONE, "0.18.0"), of(SEEN, "0.18.0")], "reopened"),
        ([SEEN, of(GONE, "0.18.0"), of(SEEN, "0.19.0")], "reopened"),
        # whoever still has the release of before sees it there
        ([SEEN, of(GONE, "0.18.0"), SEEN], "fixed"),
        ([SEEN, of(GONE, "0.18.0"), of(SEEN, "0.19.0"), of(GONE, "0.19.1")], "fixed"),
        # what bisect asks of releases, oldest first
        ([SEEN, of(GONE, "0.15.0"), of(SEEN, "0.16.0"), of(GONE, "0.18.0")], "fixed"),
        ([SEEN, of(GONE, "0.15.0"), of(SEEN, "0.16.0"), SEEN], "open"),
        # a newer Python is no newer library
        ([SEEN, replace(GONE, versions={**GONE.versions, "python": "3.11.0"})], "fixed"),
    ],
)  # fmt: skip
def test_state_follows_from_the_events(events: list[Event], state: str) -> None:
    assert life(*events).state == state


def test_a_record_says_when_and_with_what() -> None:
    other = of(SEEN, "0.9.0", machine="CPU: avx2", sentence="output is NaN")
    record = life(SEEN, other, of(GONE, "0.18.0")).record()
    assert record["first_seen"] == "2026-11-01T12:00:00+00:00"
    assert record["last_seen"] == "2026-11-01T13:00:00+00:00"
    assert record["fixed"] == "2026-11-01T14:00:00+00:00"
    assert record["fixed_in"]["torchao"] == "0.18.0"
    assert record["versions"] == {"torch": ["2.13.0+cpu"], "torchao": ["0.9.0", "0.17.0"]}
    assert record["machines"] == ["CPU: avx512_f", "CPU: avx2"]
    assert record["times_seen"] == 2 and record["sentence"] == "output is NaN"


def server() -> Path | None:
    """Where PostgreSQL's programs are."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")]
    return found[-1].parent if found else None


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of a server of our own."""
    pytest.importorskip("psycopg")
    programs = server()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed")
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    data = tmp_path / "data"
    data.mkdir()
    if user:
        subprocess.run(["chown", "postgres", data], check=True)
    start = ["-D", data, "-w", "-o", f"-k {data} -h ''"]
    subprocess.run(
        [*user, programs / "initdb", "-D", data, "-A", "trust", "-U", "postgres"],
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run([*user, programs / "pg_ctl", *start, "-l", data / "log", "start"], check=True)
    try:
        yield f"postgresql+psycopg://postgres@/postgres?host={data}"
    finally:
        subprocess.run([*user, programs / "pg_ctl", "-D", data, "-m", "fast", "stop"], check=True)


def kept_by(text: str) -> None:
    """Events come back as they went in, from whoever opens it next."""
    back = of(SEEN, "0.18.0", fingerprint="O1--output--eager--differs on repeat--torch")
    Database(text).add([SEEN, replace(back, at=NOON + timedelta(days=1))])
    Database(text).add([GONE])
    fixed, open_ = reversed(Database(text).lifetimes())
    assert fixed.events == (SEEN, GONE) and fixed.state == "fixed"
    assert open_.events == (replace(back, at=NOON + timedelta(days=1)),)


def test_a_file_keeps_events(tmp_path: Path) -> None:
    kept_by(str(tmp_path / "new" / "findings.db"))


@pytest.mark.heavy
def test_a_server_keeps_events(postgresql: str) -> None:
    kept_by(postgresql)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nosuch://me:secret@host/db", "Can't load plugin"),
        ("postgresql+nosuch://me:secret@host/db", "Can't load plugin"),
        ("://", "Could not parse"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence_without_a_password(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="--database") as error:
        Database(text)
    assert why in str(error.value) and "secret" not in str(error.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("not SQLite, but some text that is long enough to be looked at")
    with pytest.raises(ValueError, match="not a database"):
        Database(tmp_path / "a.db")
    with pytest.raises(ValueError, match="is no file"):
        Database.existing(str(tmp_path / "b.db"))
    assert Database.existing("") is None or (Path("reports/runs") / "all-findings.db").is_file()


@pytest.fixture(scope="module")
def finding() -> Finding:
    judge = open_session(SessionOptions()).judge
    case = Case(spec=Spec(recipe="torch.bf16"), data=DataSpec())
    found = unconfirmed(judge, case, Verdict("O5", "eager", "output", "diverged", "wrong value"))
    return msgspec.structs.replace(found.finding, why_suspected="")


def test_a_run_adds_what_it_found_once_and_says_what_came_back(
    tmp_path: Path, finding: Finding
) -> None:
    database, store = Database(tmp_path / "all.db"), Store(tmp_path / "one")
    store.add(finding, "#")
    assert record_run(database, store) == record_run(database, store) == []  # resumed
    (one,) = database.lifetimes()
    (event,) = one.events
    assert (event.kind, event.suspected, event.finding) == ("seen", False, finding.id)
    assert Path(event.folder, "explain.json").is_file() and event.versions["torch"]

    database.add([replace(event, kind="gone")])
    again = Store(tmp_path / "two")
    again.add(finding, "#")
    (said,) = record_run(database, again)
    assert said.startswith(f"{finding.id} came back: it was gone on ")
    assert database.lifetimes()[0].state == "reopened"


def test_a_run_on_an_older_release_brings_nothing_back(tmp_path: Path, finding: Finding) -> None:
    database, store = Database(tmp_path / "all.db"), Store(tmp_path / "one")
    store.add(finding, "#")
    record_run(database, store)
    (event,) = database.lifetimes()[0].events
    database.add([replace(event, kind="gone", versions={"torch": "99.0"})])
    again = Store(tmp_path / "two")
    again.add(finding, "#")
    assert record_run(database, again) == []
    assert database.lifetimes()[0].state == "fixed"


def test_the_database_beside_the_runs_holds_what_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Database.of("", tmp_path / "elsewhere") is None and not [*tmp_path.iterdir()]
    assert Database.existing("") is None
    inside = Database.of("", Path("narrowfuzz-runs/20261101-1200/findings/0123456789ab"))
    assert inside is not None
    inside.add([SEEN])
    beside = Database.existing("")
    assert beside is not None and len(beside.lifetimes()) == 1
