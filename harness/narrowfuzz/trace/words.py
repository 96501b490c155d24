"""Text for counts, long lists of names, and command line options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def plural(n: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def few(names: Sequence[str], most: int) -> str:
    """The first ``most`` names and the number of the others: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def options(given: Mapping[str, Iterable[Any] | None]) -> list[str]:
    """The arguments with every value preceded by its option: ``--arm eager --arm inductor``."""
    return [text for name, values in given.items() for v in values or () for text in (name, str(v))]
