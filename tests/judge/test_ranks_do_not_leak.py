"""Hundreds of cases on ranks leave no threads and no memory behind, and take little time each."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.arms import sharded
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from samples import recipes
from torch._subclasses.fake_tensor import FakeTensorMode

_FLOAT8 = {"recipe": "torchao.float8.tensorwise", "backend": "emulated"}
#: Every way to lay out a linear, and what torchao communicates itself.
LAYOUTS: tuple[dict[str, Any], ...] = (
    _FLOAT8 | {"sharding": Sharding(data=2)},
    _FLOAT8 | {"sharding": Sharding(data=2, gathers="codes")},
    _FLOAT8 | {"sharding": Sharding(tensor=2, sequence=True)},
    _FLOAT8 | {"sharding": Sharding(tensor=2, narrow_styles=True)},
    _FLOAT8 | {"sharding": Sharding(data=2, tensor=2)},
)
RAISES: dict[str, Any] = {"recipe": "torch.bf16", "n": 0, "sharding": Sharding(data=2)}
WRAPPER: dict[str, Any] = {
    "recipe": "torchao.mxfp8.floor",
    "backend": "wrapper",
    "sharding": Sharding(tensor=2),
}


@cache
def judge() -> Judge:
    return Judge(recipes(), load_ledger())


def run(specs: tuple[dict[str, Any], ...], times: int) -> Iterator[float]:
    """Seconds that each of so many cases takes."""
    for seed, fields in enumerate(islice(cycle(specs), times)):
        spec = Spec(**({"m": 64, "k": 64, "n": 64} | fields))
        start = time.perf_counter()
        judge().judge(Case(spec=spec, data=DataSpec(seed=seed)))
        yield time.perf_counter() - start


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.heavy
def test_threads_and_memory_stay_as_they_are() -> None:
    list(run(LAYOUTS, 30))  # what is kept once: caches, and a thread a rank
    threads, before, alive = threading.active_count(), megabytes(), objects()
    seconds = sorted(run(LAYOUTS, 200))
    assert threading.active_count() == threads
    assert objects() - alive < 2000
    assert megabytes() - before < 16
    assert seconds[len(seconds) // 2] < 0.5


def test_ranks_that_raise_leave_no_threads() -> None:
    list(run((RAISES, LAYOUTS[0]), 2))
    threads = threading.active_count()
    list(run((RAISES, LAYOUTS[0]), 60))
    assert threading.active_count() == threads


def test_what_fake_tensors_answered_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "MOST_SHAPES", 50)
    list(run((WRAPPER,), 12))
    assert FakeTensorMode.cache_info().size <= 50
