"""Words of a report that explain themselves where they stand."""

from __future__ import annotations

from narrowfuzz.oracles import BY_NAME
from narrowfuzz.oracles.explained import rows_of

#: What a reader who has read nothing else needs to know of each.
WORDS: dict[str, str] = {
    "arm": "A way to run a model: eager, with checkpointing, compiled, without oneDNN.",
    "recipe": "A way to train in narrow precision: how the library converts a model.",
    "configuration": "What was converted, and how it was run.",
    "first shown by": "The ways to run it, from plain to compiled; the marked one is the first "
    "that shows the bug.",
    "suspected": "A rule shows it, and no script of its own reproduces it in a fresh process: kept "
    "and counted, not a finding.",
    "fingerprint": "The identity of a finding, for baselines and suppressions: rule, role, arm, "
    "symptom and family of recipes.",
    "checked": "A rule about a cast or a multiply has said something of this recipe, arm and "
    "model, or one that compares ranks with one process or with each other.",
    "required to reproduce": "What the smallest example has besides what every example has.",
}

#: Of a run whose findings may be known issues, in its verdict and where known issues stand.
UNFILTERED = "known issues were not filtered (--no-ledger)"
NOT_FILTERED = (
    "Known issues were not filtered in this run: see 'Nearest known issues' of each finding."
)


def plural(n: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def explained(word: str) -> str:
    """What a word, or a rule's name, means; "" for one that explains nothing."""
    if word not in BY_NAME:
        return WORDS.get(word, "")
    row = rows_of(word)[0]
    return f"{row.says[:1].upper()}{row.says[1:]}. {row.why}"
