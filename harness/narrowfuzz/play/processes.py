"""Ranks as processes that share a process group, as torchrun starts them: over gloo, or over NCCL
if each computes on a GPU of its own.

Gloo refuses FP8, so codes are sent as bytes. That is the only thing changed here: what gloo adds,
and in which order, is its own.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

#: Collectives that move numbers and add none: their names in any torch release, and the method of
#: torch's own process group.
_MOVES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "_allgather_base": "_allgather_base",
    "allgather": "allgather",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "broadcast": "broadcast",
    "gather": "gather",
    "recv": "recv",
    "scatter": "scatter",
    "send": "send",
}
_ADDS = {
    "_reduce_scatter_base": "_reduce_scatter_base",
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "barrier": "barrier",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
}
_TOGETHER = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


#: Functions that are called with the name of each collective that this process enters.
entering: list[Callable[[str], None]] = []
#: Contexts that a process enters when it becomes a rank, so that it has the same planted faults.
around: list[Callable[[], AbstractContextManager[None]]] = []


@contextlib.contextmanager
def entered_by_ranks(enter: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Rank processes that start while this context is open enter ``enter()``."""
    around.append(enter)
    try:
        yield
    finally:
        around.remove(enter)


def _collective(name: str, adds: bool) -> Callable[..., Any]:
    def call(group: Any, *given: Any, **options: Any) -> Any:
        group.count += 1
        for tell in entering:
            tell(f"{name} {group.count} of ranks {dist.get_process_group_ranks(group)}")
        sent = given if adds else pytree.tree_map(_bytes, given)
        return getattr(group.inner, name)(*sent, **options)

    # DDP's reducer calls it while Dynamo traces the forward, and Dynamo cannot trace it
    return torch.compiler.disable(call)  # type: ignore[no-any-return]


def _each(name: str) -> Callable[..., Any]:
    """Several tensors, one after the other: gloo does not take them together."""

    def call(group: Any, outputs: list[Any], inputs: list[Any], *options: Any) -> Any:
        one = getattr(group, name)
        works = [one(*pair, *options) for pair in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    return call


def _bytes(x: Any) -> Any:
    codes = isinstance(x, torch.Tensor) and x.dtype in _CODES
    return x.view(torch.uint8) if codes else x


def _begin(group: Any, inner: Any, device: str, kind: Any, backend: Any) -> None:
    dist.ProcessGroup.__init__(group, inner.rank(), inner.size())
    group.inner, group.device, group.count = inner, torch.device(device), 0
    # torch 2.15's flight recorder asks for its name, which a backend has
    group._set_default_backend(kind)
    group._register_backend(group.device, kind, backend)


#: A process group that sends codes as bytes, and whose collectives are counted and reported.
_Noted: Any = type(
    "Noted",
    (dist.ProcessGroup,),
    {
        **{name: _collective(inner, adds=False) for name, inner in _MOVES.items()},
        **{name: _collective(inner, adds=True) for name, inner in _ADDS.items()},
        **{name: _each(own) for name, own in _TOGETHER.items()},
        "__init__": _begin,
        "getBackendName": lambda group: _over(group.device.type),
        "_device_types": property(lambda group: [group.device]),
        "group_name": property(lambda group: dist.distributed_c10d._world.pg_names[group]),
    },
)


def _over(device: str) -> str:
    """The name of these groups' backend in torch."""
    return f"narrowfuzz_{device}"


def _group(device: str, store: Any, rank: int, ranks: int, timeout: datetime.timedelta) -> Any:
    # a group, not just the backend: its collectives unwrap libraries' own tensors
    inner, kind = dist.ProcessGroup(store, rank, ranks), dist.ProcessGroup.BackendType.GLOO
    if device == "cpu":
        backend: Any = dist.ProcessGroupGloo(store, rank, ranks, timeout)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, rank, ranks, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    inner._set_default_backend(kind)
    inner._register_backend(torch.device(device), kind, backend)
    return _Noted(inner, device, kind, backend)


def start_ranks(ranks: int) -> None:
    """Unless torchrun has started this process as a rank: fork one copy per rank, which return from
    here. This process exits with the code of the first copy that fails, or with 0."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    copies, code = set(), 0
    for rank in range(ranks):
        copy = os.fork()
        if copy == 0:
            os.environ["RANK"] = str(rank)
            return
        copies.add(copy)
    while copies and code == 0:
        copy, status = os.wait()
        copies.discard(copy)
        code = os.waitstatus_to_exitcode(status)
    for copy in copies:
        os.kill(copy, signal.SIGKILL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def on_processes(
    shape: dict[str, int],
    main: Callable[[int, Any], Any],
    store: Any = None,
    seconds: float = 60.0,
    device: str = "cpu",
) -> list[Any]:
    """The results of ``main(rank, mesh)`` on every rank of a device mesh of this shape.

    Every rank is a process that calls this; torchrun's variables give its number. Ranks meet
    through ``store``, or where torchrun says. On "cuda" each has a GPU of its own: the only visible
    one, or of several the one with its number. Raises what ``main`` raises on this rank, with the
    rank's number as ``rank``; others that wait for it raise after ``seconds``, or die if they wait
    for NCCL.
    """
    over = _over(device)
    if over not in dist.Backend.backend_list:
        dist.Backend.register_backend(over, functools.partial(_group, device), devices=[device])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    limit = datetime.timedelta(seconds=seconds)
    hook = sys.excepthook  # init_process_group wraps it
    meets = _torchruns(rank, ranks) if store is None else store
    dist.init_process_group(over, timeout=limit, world_size=ranks, rank=rank, store=meets)
    sys.excepthook = hook
    try:
        mesh = init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, _packed(main(rank, mesh)))
    except Exception as error:
        error.rank = rank  # type: ignore[attr-defined]
        raise
    finally:
        dist.destroy_process_group()
    return [torch.load(io.BytesIO(one), "cpu", weights_only=False) for one in results]


#: The store that processes of torchrun share, then one prefixed store for each meeting.
_met: list[Any] = []


def _torchruns(rank: int, ranks: int) -> Any:
    """A new prefix, for each meeting, of one store, which rank 0 hosts as long as it lives."""
    if not _met:
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _met.append(dist.TCPStore(host, port, ranks, rank == 0 and not agents))
    _met.append(dist.PrefixStore(f"meeting {len(_met)}", _met[0]))
    return _met[-1]


def _packed(value: Any) -> bytes:
    """Pickled by torch: pickle by itself does not know FP8."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
