"""Ranks that are processes: they meet, what goes wrong on one is named, and what is planted is
planted there, too."""

from __future__ import annotations

import datetime
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from narrowfuzz.arms import processes
from narrowfuzz.arms.processes import end, in_processes
from narrowfuzz.plants.registry import planted
from narrowfuzz.play.processes import _group


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(processes, "AFTER_ONE", 1.0)
    yield
    end()


def on_two(main: Callable[[int, Any], Any]) -> tuple[dict[int, Any], str]:
    return in_processes(2, lambda on: on({"data": 2}, main))


def test_every_rank_gets_what_all_leave() -> None:
    def main(rank: int, mesh: Any) -> Any:
        codes = torch.full((2,), float(rank + 1)).to(torch.float8_e4m3fn)
        every = [torch.empty_like(codes) for _ in range(2)]
        dist.all_gather(every, codes)
        total = torch.full((1,), rank + 1.0)
        dist.all_reduce(total)
        return every, float(total)

    def run(on: Callable[..., Any]) -> Any:
        left = on({"data": 2}, main)
        return [([codes.float().tolist() for codes in every], total) for every, total in left]

    left, where = in_processes(2, run)
    assert left[0] == left[1] == 2 * [([[1.0, 1.0], [2.0, 2.0]], 3.0)]
    assert "rank 1 has ended after" in where


def test_a_group_on_gpus_is_nccls_and_waits_as_long_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Options:
        _timeout = datetime.timedelta(0)

    made: list[Options] = []

    def nccl(store: Any, rank: int, ranks: int, options: Options) -> Any:
        made.append(options)
        return dist.ProcessGroupGloo(store, rank, ranks, options._timeout)

    nccl.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    limit = datetime.timedelta(seconds=7)
    group = _group("cuda", dist.HashStore(), 0, 1, limit)
    assert made[0]._timeout == limit and group.size() == 1
    assert group._device_types == [torch.device("cuda")]  # objects are gathered there
    assert group.inner._get_backend(torch.device("cuda")) is not None


def test_what_a_library_warns_of_on_a_rank_is_not_shown() -> None:
    def main(rank: int, mesh: Any) -> Any:
        with warnings.catch_warnings(record=True) as shown:
            for module in ("torch.distributed.fsdp", "a_model_of_yours"):
                warnings.warn_explicit(f"of {module}", UserWarning, f"{module}.py", 1, module)
        logs = logging.getLogger("torch._logging").isEnabledFor(logging.WARNING)
        return [str(warning.message) for warning in shown], logs

    values, _ = on_two(main)
    assert values == {rank: 2 * [(["of a_model_of_yours"], False)] for rank in range(2)}


@pytest.mark.heavy
def test_the_same_processes_serve_again() -> None:
    first, _ = on_two(lambda rank, mesh: os.getpid())
    begun = time.monotonic()
    again, _ = on_two(lambda rank, mesh: os.getpid())
    assert first[0] == again[0] and os.getpid() not in first[0]
    assert time.monotonic() - begun < 5.0


def test_processes_are_replaced_before_what_they_keep_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "MOST_RUNS", 2)
    first, second, third = (on_two(lambda rank, mesh: os.getpid())[0][0] for _ in range(3))
    assert first == second and not {*first} & {*third}


def test_what_a_rank_raises_is_raised_here() -> None:
    def main(rank: int, mesh: Any) -> None:
        if rank == 1:
            raise ZeroDivisionError("on purpose")
        dist.barrier()

    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        on_two(main)
    assert "on purpose" in str(caught.value) or "gloo" in str(caught.value)


def test_a_rank_that_waits_for_one_that_is_gone_is_named() -> None:
    def run(on: Callable[..., Any]) -> Any:
        if os.environ["RANK"] == "1":
            return "gone"
        return on({"data": 2}, lambda rank, mesh: None)

    left, where = in_processes(2, run)
    assert left == {1: "gone"}
    assert "rank 0 is in no collective" in where and "rank 1 has ended" in where


def test_a_rank_that_dies_is_named_with_its_last_collective() -> None:
    def main(rank: int, mesh: Any) -> None:
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(7)
        time.sleep(60)

    left, where = on_two(main)
    assert not left
    assert "rank 1 died with exit code 7 after allreduce 1 of ranks [0, 1]" in where
    assert on_two(lambda rank, mesh: rank)[0][0] == [0, 1]


def test_a_process_that_does_not_come_up_is_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_serve", os._exit)
    with pytest.raises(RuntimeError, match="ended with exit code 1 before it began"):
        on_two(lambda rank, mesh: None)


def test_what_is_planted_is_planted_on_ranks() -> None:
    def main(rank: int, mesh: Any) -> str:
        return dist._functional_collectives.AsyncCollectiveTensor.trigger_wait.__qualname__

    with planted("", "collective-not-waited-for"):
        assert "<lambda>" in on_two(main)[0][0][0]
    assert "<lambda>" not in on_two(main)[0][0][0]
