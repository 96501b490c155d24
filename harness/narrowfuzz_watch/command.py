"""``narrowfuzz watch``: starts the command, passes on signals, and prints the report at its end.

The parent process neither imports torch nor reads what the command prints.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from narrowfuzz_watch import FOLDER, FULL
from narrowfuzz_watch.address import At
from narrowfuzz_watch.against import alike, minority_divergence
from narrowfuzz_watch.read import RECORDS, prepared, read, reported, write
from narrowfuzz_watch.records import Cause, FirstBad, Report, Rerun
from narrowfuzz_watch.removals import REMOVALS, UNCHANGED, Change, variant
from narrowfuzz_watch.words import lines, more_times, place

#: Exit codes: of a command that succeeded, and if ``--fail`` is given and something was found.
CLEAN, FOUND = 0, 1
_SITE = Path(__file__).resolve().parent / "site"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class WatchOptions:
    """Options of ``narrowfuzz watch``."""

    command: tuple[str, ...]
    against: Path | None = None
    fail: bool = False
    out: Path | None = None
    full: bool = False
    repeat: int = 0
    remove: bool = False
    variants: tuple[str, ...] = ()


def watch_command(options: WatchOptions) -> int:
    """Run the command under watch. Returns the command's exit code, or 1 if it succeeded and
    ``--fail`` is given and something was found. If a signal killed the command, this process ends
    by the same signal. Raises ValueError for invalid options."""
    if shutil.which(options.command[0]) is None:
        raise ValueError(f"{options.command[0]!r} is no command that can be run: give it after --")
    if options.repeat < 0:
        raise ValueError(f"--repeat must not be negative, got {options.repeat}")
    if options.against is not None and not any(rank.ops for rank in read(options.against)):
        raise ValueError(f"--against {options.against} has no digests: record it with --full")
    changes = (*(REMOVALS if options.remove else ()), *map(variant, options.variants))
    folder = prepared(options.out)
    code = _run(options, folder)
    report = reported(folder, options.against, code)
    if (first := report.first) is not None and report.counts:
        if options.repeat:
            report = _repeated(options, folder, report)
        if changes:
            report.reruns = tuple(_changed(options, folder, first, changes))
        write(folder, report)
    elif options.repeat and options.full and code == CLEAN and report.divergence is None:
        write(folder, report := _compared(options, folder, report))
    for line in lines(report, folder):
        print(f"narrowfuzz watch: {line}", file=sys.stderr)
    sys.stderr.flush()
    if code < 0:
        _die(-code)
    return FOUND if options.fail and code == CLEAN and report.found else code


def _environment(options: WatchOptions, folder: Path, change: Change) -> Mapping[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **change.environment,
        FOLDER: str((folder / RECORDS).resolve()),
        FULL: "full" if options.full or options.against is not None else "",
        "PYTHONPATH": str(_SITE) + (os.pathsep + path if path else ""),
    }


def _run(
    options: WatchOptions, folder: Path, log: Path | None = None, change: Change = UNCHANGED
) -> int:
    """Run the command; returns its return code, which is negative if a signal killed it."""
    environment = _environment(options, folder, change)
    command = (*options.command, *change.arguments)
    if log is None:
        child = subprocess.Popen(command, env=environment)
        with _forwarding(child):
            return child.wait()
    with log.open("wb") as sink:
        child = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
        with _forwarding(child):
            return child.wait()


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals to the command, except a terminal's Ctrl-C, which reaches it anyway."""

    def forward(number: int, frame: FrameType | None) -> None:
        if not (number == signal.SIGINT and _from_terminal()):
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _from_terminal() -> bool:
    """True if this process is in the foreground of a terminal, whose Ctrl-C goes to every process
    there."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # no terminal, or no stdin
        return False


def _die(number: int) -> None:
    """End this process by the signal that killed the command, without another core dump."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


def _repeated(options: WatchOptions, folder: Path, report: Report) -> Report:
    """Run the command again, and report how often the first bad value is at the same place."""
    assert report.first is not None
    places: list[FirstBad | None] = []
    for number in range(1, options.repeat + 1):
        again = prepared(folder / f"again-{number}")
        code = _run(options, again, again / "output.log")
        if code == -signal.SIGINT:
            break
        other = reported(again, None, code)
        places.append(other.first if other.counts else None)
    if not places:
        return report
    same = sum(place is not None and same_place(place, report.first) for place in places)
    words = f"{more_times(len(places))}, it came at the same place {_how_often(same, len(places))}"
    cause: Cause = "software or data" if same == len(places) else "hardware or race"
    if report.first.cause in ("hardware or race", "software or data", "data"):
        cause = report.first.cause  # running the operator again is stronger evidence
    first = msgspec.structs.replace(
        report.first, cause=cause, because=f"{report.first.because}; {words}"
    )
    return msgspec.structs.replace(report, first=first)


def _compared(options: WatchOptions, folder: Path, report: Report) -> Report:
    """After a run without bad values, run the command again, and report the run whose numbers
    differ from most others."""
    runs, notes = {1: read(folder)}, list(report.notes)
    for number in range(1, options.repeat + 1):
        again = prepared(folder / f"again-{number}")
        code = _run(options, again, again / "output.log")
        if code == -signal.SIGINT:
            break
        if code != CLEAN:
            notes.append(f"run {number + 1} ended with exit code {code}: it is not compared")
        elif not alike(other := read(again), runs[1]):
            notes.append(f"run {number + 1} ran other operators: it is not compared")
        else:
            runs[number + 1] = other
    disagreement = minority_divergence(runs) if len(runs) > 1 else None
    if disagreement is None and len(runs) > 1:
        notes.append(f"{more_times(len(runs) - 1)}, it made the same numbers, bit for bit")
    return msgspec.structs.replace(report, divergence=disagreement, notes=tuple(notes))


def _how_often(same: int, runs: int) -> str:
    if runs == 1:
        return "again" if same else "no more"
    return "each time" if same == runs else f"in {same} of them"


def same_place(first: FirstBad, other: FirstBad) -> bool:
    """True if both are at the same step, phase, module and operator. The rank is ignored: if
    several ranks make the value at once, any of them may report it first; and a value that a faulty
    device makes on one rank does not come on another rank at the same operator of the same step."""
    return _without_rank(first) == _without_rank(other)


def _without_rank(first: FirstBad) -> At:
    return msgspec.structs.replace(first.at, rank=0, index=())


def _changed(
    options: WatchOptions, folder: Path, first: FirstBad, changes: Sequence[Change]
) -> Iterator[Rerun]:
    """Run the command again with one thing changed each time. First nothing is changed: if the bad
    value is gone even then, it comes by chance, and the changes would prove nothing."""
    for number, change in enumerate((UNCHANGED, *changes)):
        again = prepared(folder / f"changed-{number}")
        code = _run(options, again, again / "output.log", change)
        if code == -signal.SIGINT:
            return
        rerun = _rerun(change, reported(again, None, code), first)
        yield rerun
        if change is UNCHANGED and rerun.came != "still there":
            return


def _rerun(change: Change, other: Report, first: FirstBad) -> Rerun:
    if other.first is not None and other.counts:
        same = same_place(other.first, first)
        where = "at the same place" if same else f"at {place(other.first.at)}"
        return Rerun(change=change.name, came="still there", detail=where, told=where)
    if other.exit_code != CLEAN and other.steps < first.at.event:
        words = f"it ended with exit code {other.exit_code} before step {first.at.event} was over"
    elif not other.trained:
        words = "no training was seen"
    else:
        return Rerun(change=change.name, came="gone")
    return Rerun(change=change.name, came="unknown", detail=words, told=words)
