"""Which rows of a long table are tried each time; all of them are in `make nightly`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, rows: Iterable[Any]) -> list[Any]:
    """The rows as parameters, one in so many of them each time, the others at night."""
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=() if number % every == 0 else pytest.mark.heavy,
        )
        for number, row in enumerate(rows)
    ]
