"""The totals of a run, from its first case to its last."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from narrowfuzz.triage.finding import Finding


@dataclass(frozen=True)
class Found:
    """One confirmed finding, and how far the campaign was when a script first reproduced it."""

    finding: Finding
    cases: int
    #: Time since the campaign began.
    seconds: float


def counted(counts: Iterable[Any], kind: str) -> list[tuple[Any, ...]]:
    """The keys of one kind among the workers' counts, without their first element: such a key is a
    tuple that begins with the name of the kind."""
    return [key[1:] for key in counts if isinstance(key, tuple) and key[0] == kind]


#: Times in seconds at which the number of pairs of features seen so far is recorded.
PAIRS_AT = (10, 20, 60, 120, 300, 600, 1200, 3600)


@dataclass
class Tally:
    """Running totals of a campaign."""

    counts: Counter[Any] = field(default_factory=Counter)
    #: Confirmed findings in the order in which they came.
    found: list[Found] = field(default_factory=list)
    lost_workers: int = 0
    interrupted: bool = False
    #: True if a worker ended by an exception of narrowfuzz's own: its findings are valid, but the
    #: run is not complete.
    broken: bool = False
    started: float = field(default_factory=time.monotonic)
    #: Seconds until the first worker had its libraries, its fault and its recipes ready; 0: none
    #: has yet.
    ready: float = 0.0
    first_verdict: float = 0.0
    #: Seconds (of ``PAIRS_AT``) -> the number of pairs of features seen by then.
    pairs_after: dict[int, int] = field(default_factory=dict)
    #: True once the requested number of findings is reached: no more suspected ones are triaged.
    enough: bool = False
    #: (worker, generation) -> hash of the ids of its cases, for each process that has ended.
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    #: Worker -> what it compiles, and the start time on the monotonic clock.
    compiling: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: Worker -> what it does to confirm or shrink a finding, and the start time.
    confirming: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: Worker -> a case that has been running for long, and its start time.
    running: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: What could not be done, in sentences.
    notes: list[str] = field(default_factory=list)
    #: Threads that triage cases which killed or hung their worker.
    loss_threads: list[threading.Thread] = field(default_factory=list)
    #: Held while such a case is triaged, as the next may show the same finding.
    loss_lock: threading.Lock = field(default_factory=threading.Lock)

    def note_pairs(self) -> None:
        """Record the number of pairs of features seen so far, for each time of ``PAIRS_AT`` that
        has passed."""
        due = [at for at in PAIRS_AT if at <= self.seconds and at not in self.pairs_after]
        if due:
            self.pairs_after |= dict.fromkeys(due, len(counted(self.counts, "pair")))

    @property
    def new(self) -> int:
        return len(self.found)

    @property
    def digest(self) -> str:
        """A hash of all cases: worker by worker, each in the order in which it judged them."""
        return hashlib.sha256(repr(sorted(self.digests.items())).encode()).hexdigest()[:16]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started
