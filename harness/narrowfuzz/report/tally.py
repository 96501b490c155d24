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
    """One confirmed finding, and how far the campaign was when a script first showed it."""

    finding: Finding
    cases: int
    #: Since the campaign began.
    seconds: float


def counted(counts: Iterable[Any], kind: str) -> list[tuple[Any, ...]]:
    """What workers have counted of one kind: such a key begins with its name, and is a tuple."""
    return [key[1:] for key in counts if isinstance(key, tuple) and key[0] == kind]


#: Seconds after which it is written down how many pairs of features have met.
PAIRS_AT = (10, 20, 60, 120, 300, 600, 1200, 3600)


@dataclass
class Tally:
    """Running totals of a campaign."""

    counts: Counter[Any] = field(default_factory=Counter)
    #: Confirmed findings in the order they came, each with the cases judged and the time by then.
    found: list[Found] = field(default_factory=list)
    lost_workers: int = 0
    interrupted: bool = False
    #: A worker ended by an exception of ours: what it found stands, but the run is not complete.
    broken: bool = False
    started: float = field(default_factory=time.monotonic)
    #: When the first worker had its libraries, its fault and its recipes ready; 0: none had.
    ready: float = 0.0
    first_verdict: float = 0.0
    #: After so many seconds, so many pairs of features had met in some case.
    pairs_after: dict[int, int] = field(default_factory=dict)
    #: As many are found as were asked for: what is not looked into yet stays so.
    enough: bool = False
    #: A hash of the ids of the cases of each process that came to its end: worker, generation.
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    #: Worker -> what it compiles, and since when on the monotonic clock.
    compiling: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: Worker -> what it does about a finding, and since when.
    confirming: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: Worker -> the case that it runs for long, and since when.
    running: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: What could not be done, in sentences.
    notes: list[str] = field(default_factory=list)
    losses: list[threading.Thread] = field(default_factory=list)
    #: Held while a loss is looked into: the next may be the same.
    looking: threading.Lock = field(default_factory=threading.Lock)

    def note_pairs(self) -> None:
        """How many pairs of features have met, at the moments that are written down."""
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
