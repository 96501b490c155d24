"""Meanings of the terms in a report, which the HTML page shows at the term itself."""

from __future__ import annotations

from collections.abc import Sequence

from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.texts import rows_of
from narrowfuzz.trace.words import plural
from narrowfuzz.triage.finding import Finding

#: Term -> explanation for a reader who has read nothing else. docs/glossary.md has those of its
#: terms word for word.
WORDS: dict[str, str] = {
    "arm": "A way to run a model: eager, with checkpointing, compiled, without oneDNN, on several "
    "ranks.",
    "recipe": "A way to train in low precision: how the library converts a model, and what it "
    "promises.",
    "configuration": "Recipe, arm and device: what was converted, and how it was run.",
    "first shown by": "The ways to run it, from plain to compiled; the marked one is the first "
    "that shows the bug.",
    "suspected": "Something that breaks a rule but that no script reproduces in a fresh process: "
    "saved and counted, not a finding.",
    "fingerprint": "What identifies a finding: rule, role of the tensor (output, scale ...), arm, "
    "symptom and family of recipes. Baselines and suppressions match by it.",
    "checked": "A rule about casts or GEMMs gave a verdict on this recipe, arm and model, or one "
    "that compares ranks with one process or with each other.",
    "bound 3.2": "How far the sum of the products of given operands may be off in any order of "
    "additions; the proof is in docs/rules.md.",
    "bound 3.3": "The same, with what quantising may cost; the proof is in docs/rules.md.",
    "still fails without": "What the example had when it was found first, but does not need.",
    "required to reproduce": "What the smallest example has besides what every example has.",
    "may be required to reproduce": "What the smallest example that was found has besides what "
    "every example has; the search for a smaller one ended before it had tried to leave out each.",
}

#: Heading of the known issues that showed in a run.
KNOWN = "Known issues that showed:"
#: Note for a run with --no-ledger, which lists known issues among its findings.
NOT_FILTERED = (
    "Known issues are listed among the findings of this run (--no-ledger): each finding that is "
    "one names it."
)


def new_and_known(found: Sequence[Finding]) -> str:
    """How many findings of a run with --no-ledger are new, how many are known issues, and how many
    were not compared with known issues, as an older release found them or time ran out."""
    known = [one.known_issue for one in found if one.known_issue]
    unasked = sum(one.known_issue is None for one in found)
    text = f"{len(found) - len(known) - unasked} new, {len(known)} known"
    if known:
        text += f" ({plural(len({*known}), 'issue')}, listed because of --no-ledger)"
    return f"{text}, {unasked} not compared with known issues" if unasked else text


def explained(word: str) -> str:
    """The meaning of a term, or of the name of a rule or an arm; "" if it is none of these."""
    if word in ARMS:
        return f"{ARMS[word].title[:1].upper()}{ARMS[word].title[1:]}."
    if word not in BY_NAME:
        return WORDS.get(word, "")
    row = rows_of(word)[0]
    return f"{row.says[:1].upper()}{row.says[1:]}. {row.why}"
