"""How a number of things, a long row of names, and options of a command are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def plural(n: int, noun: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def few(names: Sequence[str], most: int) -> str:
    """The first of them, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def options(given: Mapping[str, Iterable[Any] | None]) -> list[str]:
    """Each value behind its option: ``--arm eager --arm inductor``."""
    return [text for name, values in given.items() for v in values or () for text in (name, str(v))]
