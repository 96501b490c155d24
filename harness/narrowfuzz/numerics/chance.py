"""Whether a cast that should round at random rounds by a rule: toward zero, to nearest, as by one
number in place of many random ones.

That is no statistic of a sample: the chance of what the cast returned is computed, and only what
right rounding never returns is called wrong (``NEVER``).

>>> from narrowfuzz.numerics.formats import E2M1
>>> x = np.linspace(4.0, 6.0, 1000, dtype=np.float32)
>>> one_way(x, np.where(x > 4, 6.0, 4.0), E2M1)
'away from zero'
>>> one_way(x, np.where(x > 5, 6.0, 4.0), E2M1)
'to nearest'
>>> one_way(x[1::10], np.full(100, 6.0), E2M1)
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from narrowfuzz.numerics.formats import F32, F64, Format, neighbours

Way = Literal["toward zero", "away from zero", "up", "down", "to nearest", "by one random number"]
#: The largest chance, 5.5e-20, with which a right cast is called wrong.
NEVER = 2.0**-64
#: Hardware takes 8 random bits for an element, so chances are multiples of this.
_FINEST = 2.0**-8
#: Elements whose random bits are of one word, so that nothing is known about how they go together:
#: the chance of four is at most the least of theirs, and that at most their geometric mean.
_TOGETHER = 4


def one_way(scaled: F32, got: F64, fmt: Format) -> Way | None:
    """The rule by which a cast rounds all elements that lie between two values, but not in their
    middle; None if it follows none, or if that has a chance of at least ``NEVER``.

    Rules send n elements in one of n + 3 ways: up, down, or away from zero above one of n + 1
    places between the neighbours.

    :param scaled: what was cast.
    :param got: what it became, of each element one of its two neighbours.
    """
    low, high = neighbours(scaled, fmt)
    near, far = (np.abs(np.where(scaled > 0, *some)) for some in ((low, high), (high, low)))
    with np.errstate(divide="ignore", invalid="ignore"):
        part = (np.abs(scaled) - near) / (far - near)  # the chance of the farther one
    judged = (low != high) & (part != 0.5)
    part, away, up = part[judged], (np.abs(got) == far)[judged], (got == high)[judged]
    chance = np.minimum(np.where(away, part, 1 - part) + _FINEST, 1.0)
    bits = np.log2(chance).sum() / _TOGETHER + np.log2(len(part) + 3)
    if bits >= np.log2(NEVER):
        return None
    above, below = part[away].min(initial=1.0), part[~away].max(initial=0.0)
    rules: dict[Way, bool] = {
        "toward zero": not away.any(),
        "away from zero": bool(away.all()),
        "up": bool(up.all()),
        "down": not up.any(),
        "to nearest": bool(below < 0.5 < above),
        "by one random number": bool(below < above),
    }
    return next((way for way, followed in rules.items() if followed), None)
