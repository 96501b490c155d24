"""Which rows of a long table are tried each time (all of them are in `make nightly`), and a ledger
for models in which nothing else is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from narrowfuzz.ledger.ledger import Ledger, load_entries
from narrowfuzz.operators import DEVIATIONS


def one_in(every: int, rows: Iterable[Any]) -> list[Any]:
    """The rows as parameters, one in so many of them each time, the others at night."""
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=() if number % every == 0 else pytest.mark.heavy,
        )
        for number, row in enumerate(rows)
    ]


def of_operators() -> Ledger:
    """What is known of torch's own operators, and nothing else: a right model shows it, too."""
    return Ledger([entry for entry in load_entries() if entry.deviation in DEVIATIONS])
