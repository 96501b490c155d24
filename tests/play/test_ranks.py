"""Ranks that are threads: they share collectives, and never wait for ever."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from narrowfuzz.play.ranks import Disagree, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
)


def ones() -> torch.Tensor:
    return torch.ones(3)


def added(rank: int, mesh: Any) -> list[float]:
    dist.all_reduce(t := ones() * (rank + 1))
    return t.tolist()  # type: ignore[no-any-return]


def test_every_rank_gets_what_all_bring() -> None:
    assert on_ranks({"data": 2, "tensor": 2}, added) == [[10.0] * 3] * 4


def test_a_mesh_has_groups_of_its_own() -> None:
    def inside(rank: int, mesh: Any) -> float:
        dist.all_reduce(t := ones() * rank, group=mesh["tensor"].get_group())
        return float(t[0])

    assert on_ranks({"data": 2, "tensor": 2}, inside) == [1.0, 1.0, 5.0, 5.0]


def test_what_a_rank_raises_ends_the_others_and_names_it() -> None:
    def main(rank: int, mesh: Any) -> None:
        if rank == 1:
            raise ValueError("rank 1 has no rows")
        dist.all_reduce(ones())

    with pytest.raises(ValueError, match="no rows") as raised:
        on_ranks({"data": 3}, main)
    assert raised.value.rank == 1  # type: ignore[attr-defined]
    assert on_ranks({"data": 2}, added) == [[3.0] * 3] * 2  # the next case is not its victim


def test_ranks_that_call_different_collectives_raise() -> None:
    def main(rank: int, mesh: Any) -> None:
        if rank:
            dist.all_reduce(ones())
        else:
            dist.broadcast(ones(), 0)

    with pytest.raises(Disagree, match=r"AllReduce|Broadcast"):
        on_ranks({"data": 2}, main)


def test_ranks_that_bring_other_shapes_raise() -> None:
    with pytest.raises(Disagree, match="brings"):
        on_ranks({"data": 2}, lambda rank, mesh: dist.all_reduce(torch.ones(3 + rank)))


def test_a_rank_that_waits_for_one_that_is_gone_is_named() -> None:
    def main(rank: int, mesh: Any) -> None:
        dist.all_reduce(ones())
        if rank == 1:
            dist.all_reduce(ones())

    with pytest.raises(Disagree, match=r"rank 1 waits in AllReduce 2 .* rank 0 has ended"):
        on_ranks({"data": 2}, main, patience=0.2)


def test_ranks_leave_no_threads_behind() -> None:
    on_ranks({"data": 4}, added)
    before = threading.active_count()
    for _ in range(40):
        on_ranks({"data": 2, "tensor": 2}, added)
    assert threading.active_count() == before


def test_ranks_that_leave_their_modes_in_another_order_leave_none() -> None:
    """Compiled code would be compiled again at each call in a mode, for as long as the process."""
    first, entered, left = (threading.Event() for _ in range(3))

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def main(rank: int, mesh: Any) -> None:
        if rank == 0:
            with Mode():
                first.set()
                entered.wait(10)
            left.set()
        else:
            first.wait(10)
            with Mode():
                entered.set()
                left.wait(10)

    on_ranks({"data": 2}, main)
    assert not is_in_torch_dispatch_mode()
    assert not is_in_any_mode_without_ignore_compile_internals()


def test_replicas_that_leave_their_forwards_in_another_order_leave_none() -> None:
    """Models that are no replicas would be compiled for its buckets, as long as the process."""
    first, entered, left = (threading.Event() for _ in range(3))

    def main(rank: int, mesh: Any) -> None:
        replica = DistributedDataParallel(nn.Linear(2, 2))
        if rank == 0:
            with replica._inside_ddp_forward():
                first.set()
                entered.wait(10)
            left.set()
        else:
            first.wait(10)
            with replica._inside_ddp_forward():
                entered.set()
                left.wait(10)

    on_ranks({"data": 2}, main)
    assert DistributedDataParallel._get_active_ddp_module() is None


def test_no_garbage_is_collected_while_ranks_run() -> None:
    assert gc.isenabled()
    assert on_ranks({"data": 2}, lambda rank, mesh: gc.isenabled()) == [False, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        on_ranks({"data": 2}, lambda rank, mesh: 1 // 0)
    assert gc.isenabled()
