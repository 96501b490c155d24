"""The severity of a divergence: one rule, for findings and ledger entries alike.

It weighs what a maintainer would: whether the divergence is silent or raises an error; how much
worse than documented outputs and gradients become; on what data; and whether the use is documented.

    silent, worse by a hundredth or more      2
    silent, worse by a thousandth or more     1
    an exception, a crash, a hang             1
    anything else                             0

One step less on data at the edge of a binade, or with an infinity or a NaN; two on data near the
ends of the range. One step less for a documented but rare use, two for one that is not documented
or that the library declares as a limit. A use counts as documented, too, where the library treats
it as meant to work: its maintainers have repaired it before, test it, or call a report of it a bug.
2 is high, 1 medium, 0 and less low. A divergence that a release has fixed is low, whatever is
installed: its maintainers have nothing to do, and an upgrade helps. A finding that is a known issue
has the severity of that entry, whose author has read the documentation; for any other finding the
use counts as documented.

"Worse" is the *excess error* of the worst output or gradient: how much further it is from the
unquantised result than the recipe, as documented, would be. FP8 itself costs 2 to 4 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Symptom = Literal["silent", "loud"]
Use = Literal["documented", "rare", "undocumented", "limitation"]

LARGE, SMALL = 1e-2, 1e-3
_LESS_BY_DATA = {
    "gaussian": 0,
    "zero_rows": 0,
    "outlier": 0,
    "heavy_tail": 0,
    "outlier_rows": 0,
    "equal": 1,
    "aligned": 1,
    "binade_edges": 1,
    "mined": 1,
    "inf_nan": 1,
    "near_max": 2,
    "scale_ends": 2,
    "subnormal": 2,
}
_LESS_BY_USE: dict[Use, int] = {"documented": 0, "rare": 1, "undocumented": 2, "limitation": 2}
DATA = tuple(_LESS_BY_DATA)
_STEPS = ("", "one step less", "two steps less")
_WHY_DATA = ("", "it takes rare data", "it takes data near the ends of the range")
_WHY_USE: dict[Use, str] = {
    "documented": "",
    "rare": "the use is documented but rare",
    "undocumented": "the use is not documented",
    "limitation": "the library declares the use as a limit",
}


@dataclass(frozen=True)
class Weighed:
    """A severity, and the steps of the rule that led to it, in words."""

    severity: Severity
    why: str


def weighed(
    symptom: Symptom, effect: float, data: str, use: Use = "documented", *, cured: str = ""
) -> Weighed:
    """The severity of a divergence, and why.

    ``effect`` is the excess error as a fraction of the result's norm; infinite where the result is
    NaN or infinity instead of a number. ``data`` is the most ordinary value class that shows it.
    ``cured`` names the release that has fixed it, "" if none has.
    """
    if cured:
        return Weighed("low", f"{cured} has cured it, so an upgrade helps: low")
    if symptom == "loud":
        level, why = 1, "an error or the end of the process reveals it: medium"
    elif effect >= LARGE:
        level = 2
        why = "no error tells of it, and its effect is large (1 % of a result or more): high"
    elif effect >= SMALL:
        level, why = 1, "no error tells of it, and its effect is small or not known: medium"
    else:
        level, why = 0, "no result is off by 0.1 %: low"
    by_data, by_use = _LESS_BY_DATA[data], _LESS_BY_USE[use]
    if by_data:
        why += f"; {_STEPS[by_data]}, as {_WHY_DATA[by_data]}"
    if by_use:
        why += f"; {_STEPS[by_use]}, as {_WHY_USE[use]}"
    level -= by_data + by_use
    return Weighed("high" if level >= 2 else "medium" if level == 1 else "low", why)
