"""The cases that a run begins with: who judges which, and what waits for what."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.campaign.check_head import VALUES
from narrowfuzz.campaign.config import Config, Place
from narrowfuzz.campaign.first import compiled, dealt
from narrowfuzz.campaign.worker import Worker
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case
from narrowfuzz.draw.strategies import WILD
from narrowfuzz.machine.device import Device

EAGER = Spec(recipe="torch.bf16")
ONE, TWO = (Spec(recipe="torch.bf16", compile="inductor", m=m) for m in (16, 32))


def case(spec: Spec, seed: int) -> Case:
    return Case(spec=spec, data=DataSpec(seed=seed))


CASES = [
    case(EAGER, 0), case(ONE, 1), case(ONE, 2), case(EAGER, 3), case(TWO, 4), case(ONE, 5),
    case(EAGER, 6),
]  # fmt: skip


def test_one_worker_has_all_and_what_is_found_waits_for_the_first_that_is_compiled() -> None:
    order = [(c.data.seed, waits) for c, waits in dealt(CASES, 0, 1)]
    # the last of the first compiled program lets what waited through
    assert order == [
        (0, True),
        (1, True),
        (2, True),
        (5, False),
        (3, False),
        (4, False),
        (6, False),
    ]


def test_each_program_is_compiled_by_one_worker() -> None:
    parts = [[c for c, _ in dealt(CASES, number, 2)] for number in range(2)]
    assert sorted(c.data.seed for part in parts for c in part) == list(range(7))
    owners = {c.spec.m: number for number, part in enumerate(parts) for c in part if compiled(c)}
    assert all(
        owners[c.spec.m] == number for number, part in enumerate(parts) for c in part if compiled(c)
    )
    # the first worker begins with what is judged in a second, the next compiles at once
    assert not compiled(parts[0][0]) and compiled(parts[1][0])


def test_nothing_waits_where_nothing_is_compiled() -> None:
    assert not any(waits for _, waits in dealt([case(EAGER, 0), case(EAGER, 1)], 0, 1))
    assert not list(dealt(CASES[:1], 1, 2))


def test_the_pages_say_on_how_many_kinds_of_data_a_check_is() -> None:
    numbers = {6: "six", 10: "ten"}
    assert set(WILD) > set(VALUES)
    for page in ("README.md", "docs/guide.md"):
        said = " ".join((Path(__file__).parents[2] / page).read_text().split())
        assert f"{numbers[len(VALUES)]} kinds of data" in said
        assert f"on all {numbers[len(WILD)]} kinds of data" in said


def test_first_cases_are_counted_though_time_is_up_before_the_next_ends(tmp_path: Path) -> None:
    """The supervisor ends a worker whose time is up, and what it has not sent is lost."""
    spec = Spec(recipe="torch.fp32", model="linear", dtype="fp32", m=8, k=8, n=8)
    cases = tuple(dump_case(case(spec, seed)) for seed in (1, 2))
    (tmp_path / "journal").mkdir()
    config = Config(out=tmp_path, recipes=("torch.fp32",), workers=1, first=cases)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    with receiving, sending:
        worker = Worker(config, Place(0, 0, 0, time.monotonic() + 600), sending, Device())
        sent: Counter[Any] = Counter()
        judge = worker.judge.judge

        def judged_until_killed(*args: Any, **how: Any) -> Any:
            if worker.judged:
                raise KeyboardInterrupt
            return judge(*args, **how)

        worker.judge.judge = judged_until_killed  # type: ignore[method-assign]
        worker.tell = lambda message: sent.update(message.counts)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            worker._begin()
    assert sent["cases"] == sent["first"] == 1
