"""A worker's process: when it makes room for another."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from narrowfuzz.campaign import worker


@pytest.mark.parametrize(
    ("held", "cases", "wears"), [(2**32, 0, True), (2**30, 0, False), (2**32, 100, False)]
)
def test_a_worker_that_holds_much_memory_makes_room_for_another(
    held: int, cases: int, wears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where cases are counted: what they are must not depend on a machine."""
    monkeypatch.setattr(worker, "resident", lambda: held)
    config = SimpleNamespace(cases=cases, turn_seconds=60, turn_cases=50, recycle_compiles=150)
    fresh = SimpleNamespace(
        config=config,
        began=time.monotonic(),
        judged=0,
        place=SimpleNamespace(judged=0),
        judge=SimpleNamespace(programs=SimpleNamespace(compiles=0)),
        kinds=2,
    )
    worn_out: Any = worker.Worker.worn_out
    assert worn_out.fget(fresh) is wears
