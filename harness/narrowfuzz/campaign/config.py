"""The configuration of a campaign. Plain and picklable: workers get a copy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Minutes that a run or a check takes if neither a time nor a number of cases is given.
MINUTES = 2.0


@dataclass(frozen=True)
class Place:
    """A worker's number and what is left of its task; its process may be replaced, and each process
    gets such a record."""

    number: int
    #: Number of processes that had this number before, and of cases that these have judged.
    generation: int
    judged: int
    #: Time on the monotonic clock, which all processes share.
    deadline: float


@dataclass(frozen=True)
class Config:
    """Validated options of ``narrowfuzz run``."""

    out: Path
    minutes: float = MINUTES
    workers: int = 2
    seed: int = 0
    recipes: tuple[str, ...] = ()
    recipe_files: tuple[Path, ...] = ()
    arms: tuple[str, ...] = ()
    device: str = "cpu"
    ledger: bool = True
    #: Folders with a user's own entries.
    ledgers: tuple[Path, ...] = ()
    #: Distinguishes the draws of a resumed run from those before it.
    part: int = 0
    #: Fault to plant in every worker and in the scripts of its findings: (file or "", id).
    plant: tuple[str, str] | None = None
    #: Models to draw; none: all. Linears are drawn if there are none or "linear" is one of them.
    models: tuple[str, ...] = ()
    #: Those of them that are a user's own, as FILE.py:build or package.module:build.
    own: tuple[str, ...] = ()
    #: Whether single linears are drawn, too.
    linears: bool = True
    #: Cases, as JSON, that are judged before any is drawn: the workers share them, Spec by Spec.
    first: tuple[bytes, ...] = ()
    #: The arms that these run on; none: all. Divergences are judged on lower rungs, too.
    first_arms: tuple[str, ...] = ()
    #: Cases, as JSON, that have shown a divergence before: they and their neighbours have slices.
    corpus: tuple[bytes, ...] = ()
    #: Whether sizes that are no multiple of the recipe's blocks, and empty ones, are drawn as well.
    wild_shapes: bool = True
    #: Stop after this number of judged cases, all workers together; 0: when the time is up. With a
    #: number no clock steers the draws: equal versions and arms give equal cases on any machine.
    cases: int = 0
    #: A worker silent for this long is killed and its case becomes a finding.
    hang_seconds: float = 600.0
    #: Data draws per eager Spec; and at most per compiled program, which serves draws until these
    #: have taken about as long as compiling it.
    draws: int = 16
    compiled_draws: int = 5000
    #: A worker is replaced by a fresh process after this many compilations: each costs 2-3 MB.
    recycle_compiles: int = 150
    #: Where recipes need processes of their own, a process tests one kind of recipes for so many
    #: seconds (or cases, if their number is given), then is replaced by one that tests the next.
    turn_seconds: float = 60.0
    turn_cases: int = 100
    #: End after this number of findings; 0: when the time is up.
    stop_after: int = 0
    #: The run of the other side of a comparison: divergences that it shows as well are not triaged.
    beside: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.minutes <= 60 * 24 * 7:
            raise ValueError(f"--minutes must be above 0 and at most a week, got {self.minutes:g}")
        if not 1 <= self.workers <= 64:
            raise ValueError(f"--workers must be between 1 and 64, got {self.workers}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be between 0 and 2^32 - 1, got {self.seed}")
        if self.cases < 0:
            raise ValueError(f"--cases must be at least 0, got {self.cases}")

    def asks(self, model: str) -> bool:
        """Is the model of this name among those that are drawn?"""
        return not self.models or model in self.models

    @property
    def share(self) -> int:
        """Cases that each worker judges; 0: as many as it can."""
        return -(-self.cases // self.workers)
