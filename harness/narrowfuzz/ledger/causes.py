"""Entries of the ledger by cause: what one patch would cure belongs together."""

from __future__ import annotations

from collections.abc import Sequence

from narrowfuzz.ledger.ledger import Entry


def by_cause(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Cause -> its entries, both in the order in which they come."""
    causes: dict[str, list[Entry]] = {}
    for entry in entries:
        causes.setdefault(entry.one_cause, []).append(entry)
    return causes


def same_cause(entry: Entry, entries: Sequence[Entry]) -> list[str]:
    """Ids of the other entries that the same patch would cure."""
    return [e.id for e in entries if e.one_cause == entry.one_cause and e.id != entry.id]


def counted(entries: Sequence[Entry]) -> str:
    """How many causes they have, and how many of them are bugs, in a sentence."""
    bugs = [entry for entry in entries if entry.kind == "bug"]
    return (
        f"{_many(len(by_cause(entries)), 'cause', 'causes')} of "
        f"{_many(len(entries), 'entry', 'entries')}; "
        f"{_many(len(bugs), 'entry that a', 'entries that a')} maintainer would mend, "
        f"of {_many(len(by_cause(bugs)), 'cause', 'causes')}"
    )


def _many(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
