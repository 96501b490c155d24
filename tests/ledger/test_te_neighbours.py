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


@functools.cache
def judged(version: str) -> dict[tuple[str, str], Any]:
    """(entry, alone or beside) -> what was judged."""
    lines = on_transformer_engine("te_neighbours_checks.py", version=version)
    found = [json.loads(line) for line in lines if line.startswith('{"entry"')]
    return {(one["entry"], one["how"]): one for one in found}


@pytest.mark.heavy
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["entry"])
def test_the_entry_explains_its_case(row: Any) -> None:
    found = judged(row["version"])[row["entry"], "alone"]
    assert not found["new"] and row["entry"] in found["explained"]


@pytest.mark.heavy
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["entry"])
def test_another_failure_of_that_case_is_reported(row: Any) -> None:
    assert judged(row["version"])[row["entry"], "beside"]["new"]


def test_every_entry_of_the_library_that_explains_something_has_a_neighbour() -> None:
    assert explaining("emulated") == {row["entry"] for row in ROWS}
