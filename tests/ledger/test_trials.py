"""Entries on what they do not name: tried once by their script, and the answer kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import narrowfuzz.ledger.ledger
import narrowfuzz.triage.trials
import pytest
from narrowfuzz.ledger.ledger import Entry
from narrowfuzz.triage.trials import Trials, source_hash, trials_line
from narrowfuzz.triage.verify import ScriptRun


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """An entry with a script in a ledger of its own, and a cache of its own."""
    monkeypatch.setenv("NARROWFUZZ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "one.py").write_text("raise SystemExit(1)")
    return Entry(
        id="one", title="t", explanation="e", expected="x", workaround="none known", links=("l",),
        symptom="loud", effect=0.0, data="gaussian", use="documented", documentation="d",
        hardware=("cpu",), recipes=("*",), versions={"torch": ">=99"}, review="2027-01-01",
        script="one.py", folder=str(tmp_path),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "answer", "holds"),
    [(1, "shows", True), (-6, "shows", True), (0, "gone", False), (125, "cannot tell", False),
     (None, "cannot tell", False), (3, "cannot tell", False)],
)  # fmt: skip
def test_a_script_answers(entry: Entry, code: int | None, answer: str, holds: bool) -> None:
    trials = Trials(lambda path: ScriptRun(code, "said"))
    assert trials(entry) is holds
    assert trials.answers == {"one": answer}


def test_an_entry_is_tried_once_and_by_every_process_that_asks_later(entry: Entry) -> None:
    runs: list[Path] = []

    def run(path: Path) -> ScriptRun:
        runs.append(path)
        return ScriptRun(1, "")

    first, second = Trials(run), Trials(run)
    assert first(entry) and first(entry) and second(entry)
    assert len(runs) == 1


def test_what_ran_out_of_time_is_asked_again(entry: Entry) -> None:
    codes = iter([None, 1])

    def run(path: Path) -> ScriptRun:
        return ScriptRun(next(codes), "")

    assert not Trials(run)(entry)
    assert Trials(run)(entry)


def test_a_changed_script_or_library_is_asked_anew(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([1, 0, 1])

    def run(path: Path) -> ScriptRun:
        return ScriptRun(next(codes), "")

    assert Trials(run)(entry)
    (tmp_path / "one.py").write_text("raise SystemExit(0)")
    assert not Trials(run)(entry)
    monkeypatch.setattr(narrowfuzz.triage.trials, "source_hash", lambda package: "a commit later")
    assert Trials(run)(entry)


def test_the_script_itself_is_run_in_a_fresh_process(entry: Entry) -> None:
    assert Trials()(entry)


def test_a_package_is_known_by_its_sources(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "some_library_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1")
    monkeypatch.syspath_prepend(tmp_path)
    before = source_hash("some_library_of_tests")
    source_hash.cache_clear()
    (package / "__init__.py").write_text("a = 2")
    assert source_hash("some_library_of_tests") != before
    assert source_hash("no_such_library_here") == "absent"


def test_the_line_counts_what_was_asked_and_what_was_not() -> None:
    assert trials_line({}, 0) == ""
    line = trials_line({"a": "shows", "b": "gone", "c": "cannot tell"}, 5)
    assert "1 still show, 1 are gone, 1 could not run, 2 were not tried" in line


def test_news_are_told_once(entry: Entry) -> None:
    trials = Trials(lambda path: ScriptRun(0, ""))
    trials(entry)
    assert trials.new_answers() == [("one", "gone")] and trials.new_answers() == []
