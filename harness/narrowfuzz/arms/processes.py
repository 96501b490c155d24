"""Ranks that are processes: started once, and given one run after the other.

They are forked from a fork server that has imported torch and trained nothing. If a rank does not
finish a run, the caller learns in which collective each rank is, and the processes are replaced.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from narrowfuzz.case.layout import LAYOUTS
from narrowfuzz.case.layout.one import ONE
from narrowfuzz.machine.environment import quieten
from narrowfuzz.machine.gpu import gpus
from narrowfuzz.play import processes
from narrowfuzz.recipe.content import folders

#: Seconds that a run may take, and seconds that the others may take after one rank has finished.
PATIENCE, AFTER_ONE = 120.0, 5.0
#: Runs after which processes are replaced. Guards keep code that was compiled over a mesh alive
#: even after torch._dynamo.reset(), and with it the mesh's groups, each with three gloo threads.
MOST_RUNS = 100
#: Text in gloo's error message where another rank is gone or did not answer in time.
TRANSPORT = "gloo/transport"


def _as_code(cached: Any) -> tuple[Any, ...]:
    """Pickles a cached function of a recipe's file by the function it wraps."""
    return _cached, (cached.__wrapped__, cached.cache_parameters())


def _cached(function: Any, how: dict[str, Any]) -> Any:
    return functools.lru_cache(**how)(function)


copyreg.pickle(type(functools.lru_cache(_cached)), _as_code)


@dataclass
class _Rank:
    process: Any
    channel: Connection
    #: Shared memory with the name of the last collective that the rank entered.
    last_collective: Any
    runs: int = 0


#: Rank -> its process. They live as long as this process, or until the contexts to enter change
#: (other planted faults).
_ranks: dict[int, _Rank] = {}
#: The contexts that these processes have entered.
_entered: list[Callable[[], AbstractContextManager[None]]] = []


def in_processes(
    ranks: int, run: Callable[[Callable[..., list[Any]]], Any], device: str = "cpu"
) -> tuple[dict[int, Any], str]:
    """Call ``run(on)`` in each of ``ranks`` processes, where ``on`` is ``on_processes`` with their
    common store.

    Returns the results by rank, in the order in which the ranks finished, and a text that names the
    last collective of each. Once a rank has finished, the others have ``AFTER_ONE`` seconds; those
    that do not finish are missing from the results, and all processes are replaced.

    Raises an exception that ``run`` raised in a process, and RuntimeError where a process did not
    start.
    """
    if _entered != processes.around or any(r.runs >= MOST_RUNS for r in _ranks.values()):
        end()
        _entered[:] = processes.around
    for module in folders:  # definitions in a recipe's folder are pickled as code, too
        cloudpickle.register_pickle_by_value(module)
    with tempfile.TemporaryDirectory() as folder:
        task = cloudpickle.dumps((run, str(Path(folder) / "store"), ranks))
        new = [rank for rank in range(ranks) if rank not in _ranks]
        _ranks.update((rank, _start(rank, device)) for rank in new)
        for rank in new:
            _come_up(rank)
        for rank in range(ranks):
            _ranks[rank].last_collective.value = b"no collective"
            _ranks[rank].runs += 1
            _ranks[rank].channel.send_bytes(task)
        results, where = _wait(ranks)
    if len(results) < ranks:
        end()
    for value in results.values():
        if isinstance(value, BaseException):
            raise value
    return results, where


def end() -> None:
    """Kill all rank processes."""
    for rank in _ranks.values():
        rank.process.kill()
        rank.process.join()
        rank.channel.close()
    _ranks.clear()


def _start(number: int, device: str) -> _Rank:
    context = mp.get_context("forkserver")
    modules = ["campaign.preload", "arms.sharded"]  # the first switches off libraries' logging
    modules += [f"play.{layout.name}" for layout in LAYOUTS if layout is not ONE]
    if device == "cpu":  # importing torchao initialises CUDA, which does not survive a fork
        modules.append("campaign.preload_torchao")
    context.set_forkserver_preload([f"narrowfuzz.{name}" for name in modules])
    here, there = context.Pipe()
    last_collective = context.Array("c", 200)
    enters = cloudpickle.dumps(tuple(_entered))
    serve = (number, there, last_collective, enters, device)
    process = context.Process(target=_serve, args=serve, daemon=True)
    process.start()
    there.close()
    return _Rank(process, here, last_collective)


def _come_up(number: int) -> None:
    """Wait until the process is ready. If it ends or hangs before that, no case is to blame:
    raises RuntimeError."""
    rank = _ranks[number]
    try:
        if rank.channel.poll(PATIENCE):
            rank.channel.recv_bytes()
            return
        how = f"has not begun within {PATIENCE:.0f} s"
    except (EOFError, ConnectionResetError):
        rank.process.join()
        how = f"ended with exit code {rank.process.exitcode} before it began"
    end()
    raise RuntimeError(
        f"the process of rank {number} {how}; see its output above. A script whose cases run on "
        'ranks does so under `if __name__ == "__main__":`, as multiprocessing asks'
    )


def _serve(
    number: int, channel: Connection, last_collective: Any, enters: bytes, device: str
) -> None:
    """The loop of a rank's process: run what the channel delivers until it is closed."""
    import torch

    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus()[number]

    torch.set_num_threads(1)
    quieten()
    processes.entering.append(partial(_note, last_collective))
    with contextlib.ExitStack() as stack:
        for enter in cloudpickle.loads(enters):
            stack.enter_context(enter())
        channel.send_bytes(b"serves")
        while True:
            try:
                run, file, ranks = cloudpickle.loads(channel.recv_bytes())
            except EOFError:
                return
            os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks)}
            try:
                store = torch.distributed.FileStore(file, ranks)
                results = run(partial(processes.on_processes, store=store, device=device))
            except Exception as error:  # noqa: BLE001 (it is raised again in the calling process)
                results = error
            try:
                channel.send_bytes(cloudpickle.dumps(results))
            except BrokenPipeError:
                return  # the calling process has ended meanwhile, as a run does when its time is up


def _note(last_collective: Any, name: str) -> None:
    last_collective.value = name.encode()[:199]


def _wait(ranks: int) -> tuple[dict[int, Any], str]:
    results: dict[int, Any] = {}
    dead: list[str] = []
    until = time.monotonic() + PATIENCE
    waiting = {_ranks[rank].channel: rank for rank in range(ranks)}
    while waiting and (ready := wait(list(waiting), max(0.0, until - time.monotonic()))):
        until = min(until, time.monotonic() + AFTER_ONE)
        for channel in ready:
            assert isinstance(channel, Connection)
            rank = waiting.pop(channel)
            try:
                results[rank] = cloudpickle.loads(channel.recv_bytes())
            except (EOFError, ConnectionResetError):
                _ranks[rank].process.join()
                code = _ranks[rank].process.exitcode
                dead.append(f"rank {rank} died with exit code {code} after {_last(rank)}")
    hangs = [f"rank {rank} is in {_last(rank)}" for rank in sorted(waiting.values())]
    ended = [f"rank {rank} has ended after {_last(rank)}" for rank in sorted(results)]
    return results, "; ".join((*dead, *hangs, *ended))


def _last(rank: int) -> str:
    name: bytes = _ranks[rank].last_collective.value
    return name.decode()
