"""The shares of faults that were found, with their uncertainty, and how long that took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowfuzz.power.record import Hunted

_Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Recall:
    """``found`` of ``of`` faults, and the 95 % interval of the share."""

    found: int
    of: int
    low: float
    high: float

    def __str__(self) -> str:
        if not self.of:
            return "none"
        return f"{self.found} of {self.of} ({self.low:.0%} to {self.high:.0%})"


#: Seconds within which faults are counted as found.
WITHIN = (10, 20, 60)


@dataclass(frozen=True)
class Speed:
    """How soon faults of one kind are found: seconds -> number found within them, and the median
    and 90th percentile of the seconds to find those that are found."""

    of: int
    within: dict[int, int]
    median: float
    ninetieth: float


@dataclass(frozen=True)
class Summary:
    """The numbers that a score is judged by."""

    everything: Recall
    #: Recall of faults in torch, torchao or TransformerEngine; in narrowfuzz's own references; and
    #: of faults that need a compiler.
    libraries: Recall
    references: Recall
    compiled: Recall
    families: dict[str, Recall]
    #: Seconds to the verified finding, for found faults that need no compiler.
    median: float
    ninetieth: float
    #: The same for the slowest found fault that needs a compiler.
    compiled_slowest: float
    #: Keys: ``eager`` (in one process), ``ranks``, and ``compiled`` (needs a compiler).
    speeds: dict[str, Speed]


def wilson(found: int, of: int) -> tuple[float, float]:
    """Wilson's score interval of a share at 95 % (JASA 22, 1927, page 209)."""
    if not of:
        return 0.0, 1.0
    share, z2 = found / of, _Z * _Z
    # at the ends the root is the middle, up to a rounding
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return (middle - half if found else 0.0), (middle + half if found < of else 1.0)


def recall(faults: Iterable[Hunted]) -> Recall:
    """The recall among the faults that could be hunted."""
    hunted = [fault for fault in faults if not fault.problem]
    found = sum(fault.found for fault in hunted)
    return Recall(found, len(hunted), *wilson(found, len(hunted)))


def summarise(faults: Sequence[Hunted]) -> Summary:
    """Recall overall and by family, and how long the hunts took."""
    quick = [f.seconds for f in faults if f.seconds is not None and not f.compiled]
    compiled = [f.seconds for f in faults if f.seconds is not None and f.compiled]
    return Summary(
        everything=recall(faults),
        libraries=recall(f for f in faults if not f.ours),
        references=recall(f for f in faults if f.ours),
        compiled=recall(f for f in faults if f.compiled),
        families={
            name: recall(f for f in faults if f.family == name)
            for name in sorted({f.family for f in faults})
        },
        median=statistics.median(quick) if quick else math.nan,
        ninetieth=percentile(quick, 0.9),
        compiled_slowest=max(compiled, default=math.nan),
        speeds={
            kind: _speed([f for f in faults if not f.problem and _kind(f) == kind])
            for kind in ("eager", "ranks", "compiled")
        },
    )


def _kind(fault: Hunted) -> str:
    if fault.compiled:
        return "compiled"
    return "ranks" if fault.family == "sharding" else "eager"


def _speed(faults: Sequence[Hunted]) -> Speed:
    times = [fault.seconds for fault in faults if fault.seconds is not None]
    return Speed(
        len(faults),
        {most: sum(time <= most for time in times) for most in WITHIN},
        statistics.median(times) if times else math.nan,
        percentile(times, 0.9),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed; NaN if there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
