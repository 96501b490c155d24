"""``narrowfuzz compare``: the same cases on two installations, side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from narrowfuzz.campaign.accept import Accepting, check_accepting, write_accepted
from narrowfuzz.campaign.comparison import LETTERS, Comparison, compared, side_run
from narrowfuzz.campaign.comparison_side import count_seen, read_seen, shown_alone
from narrowfuzz.campaign.comparison_words import as_json, lines_of, write_page, write_summary
from narrowfuzz.campaign.interrupts import on_interrupt
from narrowfuzz.ledger.exits import CLEAN, FOUND, INTERRUPTED, OURS, TOO_LITTLE, USAGE
from narrowfuzz.machine.overlay import folder_of
from narrowfuzz.report import terminal
from narrowfuzz.trace import words

#: Exit codes of a run that came to its end.
_ENDED = (0, 1)
#: Seconds between two polls of the runs, and between two progress lines where there is no terminal.
_POLL_SECONDS, _SAY_SECONDS = 0.2, 10.0


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a Python interpreter, and a folder that is put before its
    packages on the path."""

    title: str
    python: str
    overlay: str = ""


@dataclass(frozen=True)
class CompareOptions:
    """Options of ``narrowfuzz compare``."""

    out: Path
    cases: int = 500
    seed: int = 1
    #: Worker processes of each side; 0: half of the cores.
    workers: int = 1
    #: Further options of ``narrowfuzz run``, for both sides.
    more: Sequence[str] = ()
    accepting: Accepting = field(default_factory=Accepting)

    @property
    def processes(self) -> int:
        return self.workers or max(1, (os.cpu_count() or 1) // 2)


class Interrupted(Exception):
    """Somebody stopped the comparison."""


def _stop() -> None:
    raise Interrupted


def side_of(text: str) -> Side:
    """The side that the text names: a Python interpreter, the folder of an environment, a folder of
    packages to lay over those of this environment, or PACKAGE==VERSION of one package.

    Raises ValueError if it is none of these, such as a package itself: laid over, its folder would
    replace nothing.
    """
    path = Path(text)
    if "==" in text:
        return Side(text, sys.executable, str(folder_of(text)))
    if path.is_file() and os.access(path, os.X_OK):
        return Side(text, str(path))
    if (path / "bin" / "python").is_file():
        return Side(text, str(path / "bin" / "python"))
    if (path / "__init__.py").is_file():
        raise ValueError(
            f"{text!r} is a package: name the folder that contains it, {str(path.parent)!r}"
        )
    if path.is_dir():
        return Side(text, sys.executable, str(path.resolve()))
    raise ValueError(
        f"{text!r} is no Python, no environment, no folder of packages and no PACKAGE==VERSION"
    )


def compare_command(first: str, second: str, options: CompareOptions) -> tuple[int, dict[str, Any]]:
    """Run the same cases on both sides at the same time. Returns the exit code and the content of
    ``compare.json``. Exit codes: 0 if both show the same, 1 if not, 3 if a run did not come to its
    end, 4 if nothing was judged on both. Raises ValueError for a text that names no side, an output
    folder that exists, or options that the runs refuse."""
    check_accepting(options.accepting)
    sides = [side_of(first), side_of(second)]
    if options.out.exists():
        raise ValueError(f"--out {options.out} exists already: choose another folder")
    if options.cases < 1:
        raise ValueError(f"--cases must be at least 1, got {options.cases}")
    console = terminal.console()
    for letter, side in zip(LETTERS, sides, strict=True):
        console.print(f"{letter}: {escape(side.title)}")
    try:
        codes = _run_both(console, sides, options)
    except Interrupted:
        console.print("stopped: nothing was compared")
        return INTERRUPTED, {"exit_code": INTERRUPTED}
    for letter, side, code in zip(LETTERS, sides, codes, strict=True):
        if code not in _ENDED:
            log = options.out / f"{letter}.log"
            if code == USAGE:
                raise ValueError(f"{letter}, {side.title}: {_last_line(log)}")
            console.print(f"{letter}: its run ended with {code}: {escape(str(log))} says why")
            return OURS, {"exit_code": OURS}
    runs = [
        side_run(s.title, options.out / letter) for s, letter in zip(sides, LETTERS, strict=True)
    ]
    return _conclude(console, compared(*runs), options)


def _conclude(
    console: Console, comparison: Comparison, options: CompareOptions
) -> tuple[int, dict[str, Any]]:
    """Print and write the result; returns the same as ``compare_command``."""
    comparison, written = write_accepted(comparison, options.accepting)
    code = FOUND if comparison.differ else TOO_LITTLE if comparison.empty else CLEAN
    for line in lines_of(comparison, options.out):
        console.print(line)
    for line in written:
        console.print(escape(line))
    document = as_json(comparison) | {"exit_code": code}
    write_summary(comparison, options.out)
    write_page(comparison, options.out, document)
    page = escape(str(options.out / "report.html"))
    console.print(f"\nOutput: {escape(str(options.out))}; the page: {page}")
    return code, document


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("narrowfuzz: ") if lines else "it printed nothing"


def _run_both(console: Console, sides: Sequence[Side], options: CompareOptions) -> list[int]:
    """The exit codes of both runs. If one fails the other is stopped: there is nothing to
    compare."""
    options.out.mkdir(parents=True)
    folders = [options.out / letter for letter in LETTERS]
    processes: list[subprocess.Popen[bytes]] = []
    with on_interrupt(_stop), _progress(console) as say:
        try:
            for side, own, other in zip(sides, folders, reversed(folders), strict=True):
                processes.append(_start(side, own, other, options))
            far = _HowFar(folders, options.cases, options.processes)
            while any(process.poll() is None for process in processes):
                if any(process.poll() not in (None, *_ENDED) for process in processes):
                    break
                say(far.text)
                time.sleep(_POLL_SECONDS)
        finally:
            stopped = [process for process in processes if process.poll() is None]
            for process in stopped:
                process.terminate()
            codes = [process.wait() for process in processes]
    # a run that was stopped because the other one failed counts as clean
    return [CLEAN if p in stopped else code for p, code in zip(processes, codes, strict=True)]


def _start(side: Side, own: Path, other: Path, options: CompareOptions) -> subprocess.Popen[bytes]:
    over = os.pathsep.join(filter(None, (side.overlay, os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, **({"PYTHONPATH": over} if over else {})}
    numbers = {
        "--cases": [options.cases],
        "--seed": [options.seed],
        "--workers": [options.processes],
    }
    folders = {"--beside": [other], "--out": [own]}
    command = [side.python, "-m", "narrowfuzz", "run"]
    command += [*words.options(numbers), *options.more, *words.options(folders)]
    with Path(f"{own}.log").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


@dataclass
class _HowFar:
    """Progress of both runs."""

    folders: Sequence[Path]
    cases: int
    processes: int
    began: float = field(default_factory=time.monotonic)
    #: The time at which both had judged a case, and how many the slower one had judged by then.
    first: tuple[float, int] | None = None

    def text(self) -> str:
        """The progress line: how many cases both have judged, and how long the rest will take."""
        now, done = time.monotonic(), [count_seen(folder) for folder in self.folders]
        whole = -(-self.cases // self.processes) * self.processes
        least = min(done)
        counts = ", ".join(f"{letter} {n}" for letter, n in zip(LETTERS, done, strict=True))
        line = f"{now - self.began:4.0f} s   {counts} of {whole} cases"
        if least >= whole:
            return f"{line}   {_left_over(self.folders)}"
        if not least:
            return f"{line}   loading the libraries"
        self.first = self.first or (now, least)
        since, judged = now - self.first[0], least - self.first[1]
        if not judged:
            return line
        return f"{line}   about {since * (whole - least) / judged:.0f} s left"


def _left_over(folders: Sequence[Path]) -> str:
    """How many of the divergences that only one side shows have been triaged."""
    seen = [read_seen(folder) for folder in folders]
    one_sided = [shown_alone(mine, other) for mine, other in zip(seen, reversed(seen), strict=True)]
    parts = [
        f"{letter} {len([*(folder / 'findings').glob('*')])} of {len(names)}"
        for letter, folder, names in zip(LETTERS, folders, one_sided, strict=True)
        if names
    ]
    return f"looking into what one side shows alone: {', '.join(parts)}" if parts else "ending"


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[Callable[[], str]], None]]:
    """Yields a function that prints a line unless the last one is too recent: on a terminal, in
    place, at most once a second; elsewhere every ten seconds."""
    last = time.monotonic()
    status = console.status("starting") if console.is_terminal else None

    def say(line: Callable[[], str]) -> None:
        nonlocal last
        if time.monotonic() - last < (1.0 if status else _SAY_SECONDS):
            return
        last = time.monotonic()
        if status:
            status.update(escape(line()))
        else:
            console.print(escape(line()))

    with status or nullcontext():
        yield say
