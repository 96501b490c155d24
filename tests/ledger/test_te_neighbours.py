"""As test_ledger_neighbours.py, of TransformerEngine's entries: the case that an entry explains,
run with an unrelated failure, is reported as new. A process for each version judges its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from te_neighbours_checks import ROWS
from te_on_cpu.environment import CHOICE, ensure
from test_ledger_neighbours import explaining

CHECKS = Path(__file__).parents[1] / "te_neighbours_checks.py"

pytestmark = pytest.mark.xdist_group("te neighbours")


#: The version whose cases `make test` judges; the others wait for the night.
QUICK = "2.20.2"


def rows() -> list[Any]:
    return [
        pytest.param(row, id=row["entry"], marks=[pytest.mark.heavy] * (row["version"] != QUICK))
        for row in ROWS
    ]


@functools.cache
def told(version: str) -> dict[tuple[str, str], Any]:
    """(entry, alone or beside) -> what was judged."""
    try:
        ensure(version)
    except ValueError as why:
        pytest.skip(str(why))
    environment = {**os.environ, CHOICE: version, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"entry"')]
    return {(one["entry"], one["how"]): one for one in found}


@pytest.mark.parametrize("row", rows())
def test_the_entry_explains_its_case(row: Any) -> None:
    found = told(row["version"])[row["entry"], "alone"]
    assert not found["new"] and row["entry"] in found["explained"]


@pytest.mark.parametrize("row", rows())
def test_another_failure_of_that_case_is_reported(row: Any) -> None:
    assert told(row["version"])[row["entry"], "beside"]["new"]


def test_every_entry_of_the_library_that_explains_something_has_a_neighbour() -> None:
    assert explaining("emulated") == {row["entry"] for row in ROWS}
