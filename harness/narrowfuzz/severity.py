"""How severe a divergence is: one written rule, for findings and ledger entries alike.

It weighs what a maintainer would: does the divergence say so itself or is it silent; how much worse
than documented the outputs and gradients become; on what data; and whether the use is documented.

    silent, worse by a hundredth or more      2
    silent, worse by a thousandth or more     1
    an exception, a crash, a hang             1
    anything else                             0

One step less on data at the edge of a binade, or with an infinity or a NaN; two on data near the
ends of the range. One step less for a documented but rare use, two for one that is not documented
or that the library declares as a limit. A use counts as documented, too, where the library has said
that it is meant to work: its maintainers repaired it before, test it, or call a report of it a bug.
2 is high, 1 medium, 0 and less low; what every supported release cures is low, and of torch and
torchao the newest release is the one that is supported.

"Worse" is the *excess error* of the worst output or gradient: how much further from the unquantised
result it is than the recipe, as documented, would be. FP8 itself costs two to four hundredths.
"""

from __future__ import annotations

from typing import Literal, get_args

Severity = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Symptom = Literal["silent", "loud"]
Use = Literal["documented", "rare", "undocumented", "limitation"]

LARGE, SMALL = 1e-2, 1e-3
_LESS_BY_DATA = {
    "gaussian": 0, "zero_rows": 0, "outlier": 0, "heavy_tail": 0,
    "binade_edges": 1, "mined": 1, "inf_nan": 1, "near_max": 2, "scale_ends": 2, "subnormal": 2,
}  # fmt: skip
_LESS_BY_USE: dict[Use, int] = {"documented": 0, "rare": 1, "undocumented": 2, "limitation": 2}
DATA = tuple(_LESS_BY_DATA)


def severity(
    symptom: Symptom, effect: float, data: str, use: Use = "documented", *, cured: bool = False
) -> Severity:
    """The severity of a divergence.

    ``effect`` is the excess error, a share of the result's norm; infinite where NaN or infinity
    came out in place of a number. ``data`` is the tamest value class that shows it.
    """
    if cured:
        return "low"
    loud = symptom == "loud"
    level = 2 if not loud and effect >= LARGE else 1 if loud or effect >= SMALL else 0
    level -= _LESS_BY_DATA[data] + _LESS_BY_USE[use]
    return "high" if level >= 2 else "medium" if level == 1 else "low"
