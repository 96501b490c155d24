"""Ranks as threads of one process that share torch's threaded process group.

That group moves and adds as a real one does, in the order of ranks. It has no send and receive, and
it waits forever for a rank that never comes, so waiting ranks are recorded here: ranks that call
different collectives raise, and so does a rank that waits for one that has ended or is elsewhere.
"""

from __future__ import annotations

import datetime
import functools
import gc
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils import _pytree as pytree

#: Seconds between two checks for ranks that wait for one that will not come.
PATIENCE = 0.5


class Disagree(RuntimeError):
    """Ranks that share a process group call different collectives, or one of them calls none."""


@dataclass
class Collectives:
    """The collective that each rank is in, and the last that it entered."""

    lock: Any = field(default_factory=threading.Lock)
    #: Rank -> the collective it waits in, by name, and torch's record of the ranks that reached it.
    waiting: dict[int, tuple[str, Any]] = field(default_factory=dict)
    #: Rank -> the name of the last collective that it entered.
    last: dict[int, str] = field(default_factory=dict)
    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    ended: set[int] = field(default_factory=set)

    def enter(self, rank: int, kind: str, group: tuple[int, ...], shared: Any) -> None:
        with self.lock:
            self.counts[rank, kind] += 1
            self.last[rank] = f"{kind} {self.counts[rank, kind]} of ranks {list(group)}"
            self.waiting[rank] = self.last[rank], shared

    def leave(self, rank: int) -> None:
        with self.lock:
            self.waiting.pop(rank, None)

    def end(self, rank: int) -> None:
        self.leave(rank)
        self.ended.add(rank)

    def stuck(self, ranks: int) -> str:
        """Where ranks wait, and which have ended; "" while some rank works, or some collective has
        all its ranks and is running, however slowly."""
        with self.lock:
            if not self.waiting or len(self.waiting) + len(self.ended) < ranks:
                return ""
            if any(self._complete(shared) for _, shared in self.waiting.values()):
                return ""
            names = {rank: name for rank, (name, _) in self.waiting.items()}
            says = [f"rank {rank} waits in {name}" for rank, name in sorted(names.items())]
            gone = [
                f"rank {rank} has ended after {self.last.get(rank, 'no collective')}"
                for rank in sorted(self.ended)
            ]
            return "; ".join((*says, *gone))

    def _complete(self, shared: Any) -> bool:
        here = sum(other is shared for _, other in self.waiting.values())
        return bool(shared._done) or here == shared._world_size


def on_ranks(
    shape: dict[str, int], main: Callable[[int, Any], Any], patience: float = PATIENCE
) -> list[Any]:
    """The results of ``main(rank, mesh)`` on every rank of a device mesh of this shape.

    Raises the first exception of any rank, with that rank's number as ``rank``. Raises Disagree
    naming the waiting ranks and their collectives, if all living ranks wait for one that will not
    come; this is checked every ``patience`` seconds.
    """
    ranks = 1
    for size in shape.values():
        ranks *= size
    noted, store, done = Collectives(), dist.HashStore(), threading.Semaphore(0)
    results: list[Any] = [None] * ranks
    raised: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            limit = datetime.timedelta(seconds=60)
            dist.init_process_group(
                "threaded", rank=rank, world_size=ranks, store=store, timeout=limit
            )
            mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
            results[rank] = main(rank, mesh)
        except SystemExit:  # another rank raised
            pass
        except BaseException as error:
            error.rank = getattr(error, "rank", rank)  # type: ignore[attr-defined]
            raised.append(error)
            _release()
        finally:
            noted.end(rank)
            try:
                if dist.is_initialized():
                    dist.destroy_process_group()
            except Exception as error:
                raised.append(error)
            finally:
                done.release()

    with _modes_as_before(), _without_collector(), _threaded_group(noted):
        for rank in range(ranks):
            _thread_of(rank).put(functools.partial(run, rank))
        for _ in range(ranks):
            while not done.acquire(timeout=patience):
                if where := noted.stuck(ranks):
                    raised.append(Disagree(where))
                    _release()
    if raised:
        raise raised[0]
    return results


@contextmanager
def _without_collector() -> Iterator[None]:
    """Garbage is collected afterwards. torch holds a random generator's lock while it makes a
    tensor of its state: if a process group is collected there, another thread may run and ask for
    that lock, which is a deadlock."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _modes_as_before() -> Iterator[None]:
    """torch records for all threads together whether one is in a dispatch mode and which
    DistributedDataParallel runs, and on leaving restores what it found on entering: of several
    threads the last to leave may leave it wrong for good. Compiled code is then recompiled at every
    call inside a mode, and models that are no replicas are compiled for one's buckets."""
    from torch._C._dynamo import guards
    from torch.utils import _python_dispatch as modes

    before = {name: value for name, value in vars(modes).items() if name.startswith("_is_in_")}
    replica = DistributedDataParallel._active_ddp_module
    try:
        yield
    finally:
        vars(modes).update(before)
        inside = modes.is_in_any_mode_without_ignore_compile_internals()
        guards.set_is_in_mode_without_ignore_compile_internals(inside)
        DistributedDataParallel._active_ddp_module = replica


def _release() -> None:
    """End whoever waits in a collective. (The group's own walks what ranks may still change.)"""
    group = threaded.ProcessLocalGroup
    group._terminate.set()
    with group._coll_lock:
        collectives = [*group._cur_coll_on_pgs.values()]
    for shared in collectives:
        for waiting in (shared._start_cond, shared._done_cond):
            with waiting:
                waiting.notify_all()


#: Rank -> the tasks of its thread. DTensor caches for each thread how it shards an operator, which
#: takes longer to find out than to run the operator, so threads are reused.
_threads: dict[int, queue.SimpleQueue[Callable[[], None]]] = {}


def _thread_of(rank: int) -> queue.SimpleQueue[Callable[[], None]]:
    if rank not in _threads:
        tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        _threads[rank] = tasks

        def work() -> None:
            while True:
                tasks.get()()

        threading.Thread(target=work, daemon=True, name=f"rank {rank}").start()
    return _threads[rank]


@contextmanager
def _threaded_group(noted: Collectives) -> Iterator[None]:
    """Inside it, threads may be ranks of a threaded group, and their collectives are recorded."""
    group, collective = threaded.ProcessLocalGroup, threaded.Collective
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 reads it nevertheless
        threaded.ThreadLocalWorld.comms = []
    start, end, join = group._start_coll, group._end_coll, collective.join

    def starting(own: Any, pg: Any) -> Any:
        shared, kind = start(own, pg), type(own).__name__
        noted.enter(dist.get_rank(), kind, tuple(dist.get_process_group_ranks(pg)), shared)
        if type(shared._collective) is not type(own):
            other = type(shared._collective).__name__
            raise Disagree(f"rank {dist.get_rank()} calls {kind} where another calls {other}")
        return shared

    def ending(shared: Any, pg: Any) -> None:
        end(shared, pg)
        noted.leave(dist.get_rank())

    def joining(self: Any, rank: int, data: Any) -> Any:
        if type(self._collective).__name__ in _ALIKE:
            mine = [(t.dtype, tuple(t.shape)) for t in pytree.tree_leaves(data) if _is_tensor(t)]
            others = self.__dict__.setdefault("brought", mine)
            if mine != others:
                raise Disagree(f"rank {dist.get_rank()} brings {mine}, another {others}")
        return join(self, rank, data)

    hook = sys.excepthook  # each rank's init_process_group wraps it once more
    threaded._install_threaded_pg()
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    group._start_coll, group._end_coll, collective.join = starting, ending, joining
    try:
        yield
    finally:
        group._start_coll, group._end_coll, collective.join = start, end, join
        group.reset()
        isolate(False)
        sys.excepthook = hook
        threaded._uninstall_threaded_pg()


#: Collectives to which every rank brings tensors of the same types and shapes.
_ALIKE = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")


def _is_tensor(t: Any) -> bool:
    return isinstance(t, torch.Tensor)
