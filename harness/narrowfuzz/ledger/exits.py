"""Exit codes of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from narrowfuzz.ledger.severity import SEVERITIES, Severity

#: Nothing new; a new finding; wrong options, or a model that cannot be checked; narrowfuzz failed,
#: or the run is not complete; less was judged than required; interrupted.
CLEAN, FOUND, USAGE, OURS, TOO_LITTLE, INTERRUPTED = 0, 1, 2, 3, 4, 130

#: What makes a run fail: a finding of at least this severity; for "suspected", any divergence, even
#: if no script reproduces it.
FailOn = Literal["high", "medium", "low", "suspected"]
FAIL_ON: tuple[FailOn, ...] = get_args(FailOn)


def fails(severities: Iterable[Severity], suspected: int, least: FailOn) -> bool:
    """Does a run with findings of these severities, and this number of suspected ones, fail?"""
    if least == "suspected":
        return bool(suspected) or any(severities)
    return any(SEVERITIES.index(one) <= SEVERITIES.index(least) for one in severities)
