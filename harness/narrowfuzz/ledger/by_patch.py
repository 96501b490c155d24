"""Groups entries of the ledger by cause: one patch would fix all entries of a cause."""

from __future__ import annotations

from collections.abc import Sequence

from narrowfuzz.ledger.ledger import Entry
from narrowfuzz.trace.words import plural


def by_cause(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Cause -> its entries; causes and entries keep their order."""
    causes: dict[str, list[Entry]] = {}
    for entry in entries:
        causes.setdefault(entry.one_cause, []).append(entry)
    return causes


def same_cause(entry: Entry, entries: Sequence[Entry]) -> list[str]:
    """Ids of the other entries that the same patch would fix."""
    return [e.id for e in entries if e.one_cause == entry.one_cause and e.id != entry.id]


def counted(entries: Sequence[Entry]) -> str:
    """The number of causes of these entries, and how many are bugs, in a sentence."""
    bugs = [entry for entry in entries if entry.kind == "bug"]
    return (
        f"{plural(len(by_cause(entries)), 'cause')} of {_entries(entries)}; {_entries(bugs)} "
        f"that a maintainer would fix, of {plural(len(by_cause(bugs)), 'cause')}"
    )


def _entries(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
