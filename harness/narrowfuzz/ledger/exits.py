"""Exit codes of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from narrowfuzz.ledger.severity import SEVERITIES, Severity

#: Nothing new; a finding; what was asked for cannot be; we failed, or a run is not complete; less
#: was judged than asked for; stopped.
CLEAN, FOUND, USAGE, OURS, TOO_LITTLE, INTERRUPTED = 0, 1, 2, 3, 4, 130

#: The least that makes a run fail: a finding of this severity or a worse one, or anything that was
#: seen, even if no script shows it.
FailOn = Literal["high", "medium", "low", "suspected"]
FAIL_ON: tuple[FailOn, ...] = get_args(FailOn)


def fails(severities: Iterable[Severity], suspected: int, least: FailOn) -> bool:
    """Does a run with findings of these severities, and so many suspected ones, fail?"""
    if least == "suspected":
        return bool(suspected) or any(severities)
    return any(SEVERITIES.index(one) <= SEVERITIES.index(least) for one in severities)
