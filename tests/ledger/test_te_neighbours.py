"""As test_ledger_neighbours.py, of TransformerEngine's entries: the case that an entry explains,
run with an unrelated failure, is reported as new. A process for each version judges its own."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from fresh import on_transformer_engine
from te_neighbours_checks import ROWS
from test_ledger_neighbours import explaining

pytestmark = pytest.mark.xdist_group("te neighbours")


#: What `make test` judges: every third case of this version. The others wait for the night.
QUICK = [row["entry"] for row in ROWS if row["version"] == "2.20.2"][::3]


def rows() -> list[Any]:
    return [
        pytest.param(row, id=row["entry"], marks=[pytest.mark.heavy] * (row["entry"] not in QUICK))
        for row in ROWS
    ]


@functools.cache
def judged(version: str, quick: bool) -> dict[tuple[str, str], Any]:
    """(entry, alone or beside) -> what was judged, of the entries of this version in QUICK, or of
    the others."""
    entries = [
        r["entry"] for r in ROWS if r["version"] == version and (r["entry"] in QUICK) == quick
    ]
    lines = on_transformer_engine("te_neighbours_checks.py", *entries, version=version)
    found = [json.loads(line) for line in lines if line.startswith('{"entry"')]
    return {(one["entry"], one["how"]): one for one in found}


def judged_of(row: Any, how: str) -> Any:
    return judged(row["version"], row["entry"] in QUICK)[row["entry"], how]


@pytest.mark.parametrize("row", rows())
def test_the_entry_explains_its_case(row: Any) -> None:
    found = judged_of(row, "alone")
    assert not found["new"] and row["entry"] in found["explained"]


@pytest.mark.parametrize("row", rows())
def test_another_failure_of_that_case_is_reported(row: Any) -> None:
    assert judged_of(row, "beside")["new"]


def test_every_entry_of_the_library_that_explains_something_has_a_neighbour() -> None:
    assert explaining("emulated") == {row["entry"] for row in ROWS}
