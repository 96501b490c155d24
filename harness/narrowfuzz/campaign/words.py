"""Words of a report that explain themselves where they stand."""

from __future__ import annotations

from narrowfuzz.oracles import BY_NAME
from narrowfuzz.oracles.explained import rows_of

#: What a reader who has read nothing else needs to know of each.
WORDS: dict[str, str] = {
    "exact": "Bits are compared: no order of sums and no rounding mode explains a difference.",
    "bound": "The result lies outside an interval that is proven for every order of sums, from the "
    "operands that were really multiplied.",
    "ratio": "The error against float64 is far above the eager run's, on twenty other draws too.",
    "lattice": "Data whose sums every accumulator gets exactly: results are compared to the bit.",
    "ladder": "Data whose sums come out differently in accumulators of other widths.",
    "wild": "Data of a value class: gaussian, outliers, zero rows, edges of binades, infinities.",
    "arm": "A way to run a case: eager, recomputed, compiled, on other kernels.",
    "rungs": "The arms that the case runs on, in order; at the marked one the rule was broken.",
    "recipe": "A way to train in narrow precision: what is converted, and what it promises.",
    "suspected": "A rule shows it and no stand-alone script does: kept and counted, not a finding.",
    "fingerprint": "The identity of a cause: rule, role, arm, symptom and family of recipes.",
    "judged": "A rule about a cast or a multiply has said something of this recipe, arm and model, "
    "or one that holds ranks to one process or to each other.",
    "needs": "What the smallest case needs besides what every case has.",
}


def plural(n: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def explained(word: str) -> str:
    """What a word, or a rule's name, means; "" for one that explains nothing."""
    if word not in BY_NAME:
        return WORDS.get(word, "")
    row = rows_of(word)[0]
    return f"{row.says[:1].upper()}{row.says[1:]}. {row.why}"
