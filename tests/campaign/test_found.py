"""Findings that workers send: counted as soon as a script shows them, and named once."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import msgspec
import pytest
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.live import Live
from narrowfuzz.campaign.messages import Claimed, Counts, Finished, ScriptConfirmed, Settled
from narrowfuzz.campaign.supervisor import Supervisor
from narrowfuzz.report.store import Store
from narrowfuzz.report.tally import Tally
from narrowfuzz.triage.finding import Triaged
from rich.console import Console
from test_store import finding, suspected

pytestmark = pytest.mark.xdist_group("campaign")


def supervisor(config: Config) -> tuple[Supervisor, Tally]:
    """One that has started no process, and what it counts."""
    tally = Tally()
    return Supervisor(config, Store(config.out), tally), tally


class TestFoundAsSoonAsShown:
    def test_it_counts_from_then_with_its_smallest_case(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        large, small = finding("high", seed=1), finding("high", seed=2)
        workers.take(Counts({"cases": 3}), handle)
        workers.take(ScriptConfirmed(Triaged(large, "")), handle)
        (shown,) = tally.found
        assert shown.finding == large and handle.shown == large.id
        workers.take(Counts({"cases": 4}), handle)
        workers.take(Finished(Triaged(small, "")), handle)
        assert tally.found == [dataclasses.replace(shown, finding=small)] and shown.cases == 3
        assert not handle.shown

    def test_a_sighting_of_another_does_not_count(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        first, large, small = (
            finding(seed=i, needs=needs) for i, needs in enumerate([["switch"], [], ["switch"]])
        )
        workers.take(Finished(Triaged(first, "")), handle)
        workers.take(ScriptConfirmed(Triaged(large, "")), handle)
        assert tally.new == 2
        workers.take(Finished(Triaged(small, "")), handle)
        assert [found.finding for found in tally.found] == [first]

    def test_what_was_not_confirmed_when_a_run_ends_is_suspected(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        for i, name in enumerate(("lost", "dropped")):
            workers.take(Claimed(Triaged(suspected(seed=i, fingerprint=name), "")), handle)
        workers.take(Settled("dropped"), handle)
        assert not workers.store.suspected()
        workers.keep_claimed()
        assert [one.fingerprint for one in workers.store.suspected()] == [
            "lost"
        ] and not tally.found

    def test_what_no_script_shows_is_suspected(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        workers.take(Finished(Triaged(suspected(), "")), handle)
        assert not tally.found and len(workers.store.suspected()) == 1


def test_a_finding_is_named_once_and_as_first_found_while_nothing_smaller_is(
    tmp_path: Path,
) -> None:
    console = Console(file=io.StringIO(), width=40, soft_wrap=True)
    config = Config(out=tmp_path, workers=1)
    live, (workers, tally) = Live(console, config), supervisor(config)
    tally.ready, (handle,) = 1.0, workers.handles
    drawn, other = finding(arm="eager"), finding(seed=1, arm="eager")
    smaller = msgspec.structs.replace(other, minimal=drawn.case)
    for one in (drawn, smaller, msgspec.structs.replace(drawn, minimal=other.case)):
        workers.take(Finished(Triaged(one, "")), handle)
        live.show(tally)
    assert isinstance(console.file, io.StringIO)
    said = [line for line in console.file.getvalue().splitlines() if line.startswith("found:")]
    assert ["as first found" in line for line in said] == [True, False]
