"""How a number of things, and a long row of names, are said."""

from __future__ import annotations

from collections.abc import Sequence


def plural(n: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def few(names: Sequence[str], most: int) -> str:
    """The first of them, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
