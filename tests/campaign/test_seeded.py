"""A seed draws the same cases again; another seed, part, worker or replacement draws others."""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fresh import python
from narrowfuzz.campaign.config import Config, Place
from narrowfuzz.campaign.slices import FIRST
from narrowfuzz.case.spec import Case
from narrowfuzz.machine.device import Device

pytestmark = pytest.mark.xdist_group("campaign")


def drawn(seed: int = 1, part: int = 0, number: int = 0, generation: int = 0) -> list[str]:
    """Ids of the cases of a worker's first two eager slices."""
    from narrowfuzz.campaign.worker import Worker

    folder = Path("out")
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    models = ("torch.*", "torchao.*")  # what schedules run on takes turns with these
    config = Config(out=folder, seed=seed, part=part, recipes=models, arms=("eager",), draws=2)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    with receiving, sending:
        place = Place(number, generation, 0, time.monotonic() + 600)
        worker = Worker(config, place, sending, Device())
        cases: list[Case] = []

        def record(case: Case, oracles: Any, only: Any = None, **kw: Any) -> Any:
            cases.append(case)
            return SimpleNamespace(ran=True)

        worker._judge = record  # type: ignore[method-assign]
        for now in FIRST[:2]:
            worker.serve(now, time.monotonic() + 600)
    return [case.id for case in cases]


@cache
def first_draws() -> tuple[str, ...]:
    return tuple(drawn())


def fresh_draws(hash_seed: str) -> list[str]:
    """``drawn`` of a new interpreter."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_seeded as c; print(*c.drawn())"
    ids = python("-c", code, env={"PYTHONHASHSEED": hash_seed}).stdout.split()
    assert len(ids) > 50
    return ids


class TestDraws:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_a_seed_draws_the_same_cases_again(self) -> None:
        again = drawn()
        assert list(first_draws()) == again
        assert len(again) > 50

    @pytest.mark.heavy
    def test_a_seed_draws_the_same_cases_in_another_process(self) -> None:
        """Whatever modules lie outside site-packages: here are those of the tests."""
        assert fresh_draws(hash_seed="1") == fresh_draws(hash_seed="2") == list(first_draws())

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("change", [{"seed": 2}, {"part": 1}, {"number": 1}, {"generation": 1}])
    def test_seed_part_worker_and_replacement_draw_others(self, change: dict[str, int]) -> None:
        shared = set(first_draws()) & set(drawn(**change))
        assert len(shared) <= 5
