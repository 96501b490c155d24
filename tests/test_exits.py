"""What a run's exit code says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import get_args

import pytest
from fresh import ends
from narrowfuzz import __version__
from narrowfuzz.campaign import main
from narrowfuzz.ledger.exits import CLEAN, FOUND, FailOn, fails
from narrowfuzz.ledger.severity import Severity
from narrowfuzz.report.tally import Tally
from narrowfuzz_watch import command


@pytest.mark.parametrize(
    ("found", "suspected", "fails_on"),
    [
        ((), 0, ()),
        ((), 2, ("suspected",)),
        (("low",), 0, ("low", "suspected")),
        (("low", "medium"), 0, ("medium", "low", "suspected")),
        (("high",), 1, ("high", "medium", "low", "suspected")),
    ],
)
def test_a_run_fails_from_a_level_on(
    found: tuple[Severity, ...], suspected: int, fails_on: tuple[FailOn, ...]
) -> None:
    wrong = [one for one in get_args(FailOn) if fails(found, suspected, one) != (one in fails_on)]
    assert not wrong


def test_a_level_that_does_not_exist_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ends("run", "--fail-on", "hihg") == 2
    assert "did you mean 'high'?" in capsys.readouterr().err


def test_the_version_is_said_and_nothing_heavy_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ends("--version") == 0
    assert capsys.readouterr().out.split() == ["narrowfuzz", __version__]


def test_what_we_did_not_expect_is_a_traceback_and_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*args: object, **named: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("narrowfuzz.report.listing.known_command", raises)
    assert ends("known", "some-entry") == 3
    assert "a mistake of ours" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_reader_that_has_gone_is_no_finding() -> None:
    command = [sys.executable, "-m", "narrowfuzz", "list", "arms"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert b"Traceback" not in run.stderr.read()
    assert run.wait(120) == 3


@pytest.mark.parametrize(
    ("counted", "judged", "lost", "minutes", "incomplete"),
    [
        (60, 60, 0, None, False),
        (60, 12, 0, None, True),
        (60, 12, 0, 0.5, False),
        (0, 0, 3, 2.0, True),
        (0, 5, 3, 2.0, False),
        (0, 0, 0, 0.01, False),
    ],
)
def test_a_run_that_lost_its_workers_or_its_count_is_not_complete(
    counted: int, judged: int, lost: int, minutes: float | None, incomplete: bool
) -> None:
    options = SimpleNamespace(cases=counted, minutes=minutes)
    tally = Tally(Counter(cases=judged), lost_workers=lost)
    campaign = SimpleNamespace(run_options=options)
    assert main._incomplete(campaign, tally) is incomplete  # type: ignore[arg-type]


def test_watch_ends_with_the_codes_of_the_other_commands() -> None:
    assert (command.CLEAN, command.FOUND) == (CLEAN, FOUND)
