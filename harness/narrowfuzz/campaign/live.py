"""Progress output of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from narrowfuzz.campaign.config import Config
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.trace.words import plural

if TYPE_CHECKING:
    from narrowfuzz.report.tally import Tally


class Live:
    """Prints a progress line, on a terminal in place, elsewhere every ten seconds; and a line for
    each finding as it arrives."""

    def __init__(self, console: Console, config: Config) -> None:
        self.console, self.config, self.last = console, config, 0.0
        #: Fingerprints of the findings that were printed; one with a smaller case is not printed
        #: again.
        self.named: set[str] = set()
        self.status = console.status("starting workers") if console.is_terminal else None
        self.every = 0.25 if self.status else 10.0
        if self.status:
            self.status.start()

    def show(self, tally: Tally) -> None:
        for found in [found.finding for found in tally.found]:
            if found.fingerprint not in self.named:
                self.named.add(found.fingerprint)
                how = BY_NAME[found.arm].words
                where = f"{found.recipe}, {how}"
                if found.case == found.minimal:  # with a smaller case the numbers may differ
                    where += "; as first found"
                self.console.print(escape(f"found: {found.sentence} ({where})"))
        if time.monotonic() - self.last < self.every:
            return
        self.last = time.monotonic()
        line = escape(progress(tally, self.config))
        if self.status:
            self.status.update(line)
        else:
            self.console.print(line)

    def close(self) -> None:
        if self.status:
            self.status.stop()


def progress(tally: Tally, config: Config) -> str:
    """The progress line: how far a run is, and what takes longest."""
    counts, seconds = tally.counts, tally.seconds
    cases, minutes = config.cases, config.minutes
    of_time, of_cases = ("", f" of {cases}") if cases else (f" of {minutes * 60:.0f}", "")
    done = f"{counts['cases']}{of_cases} cases"
    if counts["cases"] == 1 and not of_cases:
        done = "1 case"
    parts = [
        f"{seconds:4.0f} s{of_time}",
        f"{done}{_rate(counts['cases'] / max(seconds, 1))}",
        plural(tally.new, "finding"),
        *_doing(tally),
    ]
    return "   ".join(parts)


def _rate(per_second: float) -> str:
    """Cases per second, in words; "" if that is less than one."""
    return f" ({per_second:.0f}/s)" if per_second >= 1 else ""


def _doing(tally: Tally) -> Iterator[str]:
    """The longest current activities: confirming a finding, compiling, and running a case in a
    worker that does neither."""
    if not tally.ready:
        yield "starting"
    busy = {*tally.confirming, *tally.compiling}
    running = {worker: what for worker, what in tally.running.items() if worker not in busy}
    for title, doing in (
        ("", tally.confirming),
        ("compiling: ", tally.compiling),
        ("running: ", running),
    ):
        if doing:
            what, since = min(doing.values(), key=lambda one: one[1])
            more = f" and {len(doing) - 1} more" if len(doing) > 1 else ""
            yield f"{title}{what}, {time.monotonic() - since:.0f} s{more}"
