"""Records collectives: what each rank sent, what it received, and which one it has not left yet.

A collective that runs in the background is complete when its work object reports so, or when an
operator reads its result: the program has then waited for it. Nothing here ever waits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowfuzz_watch import screen
from narrowfuzz_watch.observer import Observer
from narrowfuzz_watch.operators import Operator, tensors
from narrowfuzz_watch.recorder import kept

#: Collectives (by the beginning of their names) whose result is the same on every rank.
_REPLICATES = ("allreduce", "all_reduce", "allgather", "all_gather", "broadcast")


@dataclass(slots=True)
class Entered:
    """A collective that has not been left yet."""

    record: dict[str, Any]
    slot: int
    outputs: list[torch.Tensor]
    sums: list[torch.Tensor]
    incoming: int
    work: Any


class Collectives:
    """The collectives of one thread of training."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._counts: dict[tuple[int, ...], int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._open: list[Entered] = []

    @property
    def met(self) -> bool:
        """True if there has been a collective."""
        return bool(self._counts)

    @property
    def open(self) -> bool:
        return bool(self._open)

    def operator(
        self, what: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a collective operator of c10d or of the functional collectives."""
        if what.kind == "wait":
            out = func(*args, **kwargs)
            self._waited(args[0])
            return out
        named = {**dict(zip(what.names, args, strict=False)), **kwargs}
        name, ranks = _short(what), self._ranks(named)
        incoming, outgoing = _ends(named)
        functional = what.name.startswith("_c10d_functional")
        if name in ("send", "recv"):  # only two ranks take part, whatever the group's size
            at, own = named["dst" if name == "send" else "src"], self._observer.rank
            ranks = (own, ranks[at]) if name == "send" else (ranks[at], own)
            incoming, outgoing = (incoming, []) if name == "send" else ([], outgoing)
        entered = self._enter(name, ranks, incoming, named)
        with self._observer.own():  # a process group in Python must not record it a second time
            out = func(*args, **kwargs)
        entered.outputs = outgoing or (tensors(out) if functional else [])
        entered.work = None if functional else _work(out)
        self._open.append(entered)
        if not functional and entered.work is None:
            self._leave(entered)
        return out

    def called(self, call: Callable[[], Any], name: str, group: Any, named: dict[str, Any]) -> Any:
        """Run a collective of a process group that is written in Python, and whose threads
        synchronise inside it: no operator shows such a collective."""
        if self._observer.quiet:  # part of another collective
            return call()
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        incoming, outgoing = _ends(named)
        entered = self._enter(name, ranks, incoming, named)
        entered.outputs = outgoing
        with self._observer.own():
            result = call()
        self._open.append(entered)
        self._leave(entered)
        return result

    def _enter(
        self, name: str, ranks: tuple[int, ...], incoming: list[torch.Tensor], named: dict[str, Any]
    ) -> Entered:
        observer = self._observer
        number = self._counts[ranks] = self._counts.get(ranks, 0) + 1
        step, phase, layer = observer.place.now()
        first = incoming[0] if incoming else None
        record: dict[str, Any] = {
            "op": name,
            "group": list(ranks),
            "seq": number,
            "rank": observer.rank,
            "step": step,
            "during": phase,
            "layer": layer,
            "numel": sum(tensor.numel() for tensor in incoming),
            "dtype": "" if first is None else str(first.dtype).removeprefix("torch."),
        }
        root = _root(named)
        one_sends = root is not None and name.startswith(("broadcast", "scatter"))
        if one_sends and ranks[root : (root or 0) + 1] != (observer.rank,):
            incoming = []  # only the root's input is read
        read = [tensor for tensor in incoming if screen.is_checkable(tensor)]
        observer.ran += 1
        record["n"] = observer.ran
        with torch._C._AutoDispatchBelowAutograd():
            sums = [screen.total(tensor) for tensor in read]
            if observer.full:
                record["sent"] = screen.digest(incoming)
        return Entered(record, observer.recorder.entered(record), [], sums, len(sums), None)

    def settle(self, reads: Sequence[torch.Tensor] = ()) -> None:
        """Judge the results of collectives that are complete by now; to be called before an
        operator reads the tensors ``reads``.

        A result that is only written does not count as read, as the collective itself may write it:
        gloo's reduce-scatter copies its result when it is waited for, and never reports completion.
        """
        read = {_memory(tensor) for tensor in reads}
        for entered in list(self._open):
            if entered.work is None:  # a functional collective: its wait is an operator
                continue
            completed = entered.work.is_completed()
            if completed and not entered.work.is_success():  # it raised: it counts as never left
                self._open.remove(entered)
            elif completed or any(_memory(t) in read for t in entered.outputs):
                self._leave(entered)

    def _waited(self, tensor: torch.Tensor) -> None:
        for entered in list(self._open):
            if any(_memory(item) == _memory(tensor) for item in entered.outputs):
                self._leave(entered)

    def _leave(self, entered: Entered) -> None:
        self._open.remove(entered)
        record, observer = entered.record, self._observer
        with torch._C._AutoDispatchBelowAutograd():
            seen = [tensor for tensor in entered.outputs if screen.is_checkable(tensor)]
            sums = entered.sums + [screen.total(tensor) for tensor in seen]
            wanted = observer.full or record["op"].startswith(_REPLICATES)
            digests = (
                [screen.bits(tensor).sum(dtype=torch.int64) for tensor in entered.outputs]
                if wanted
                else []
            )
            observer.later(sums, digests, functools.partial(self._left, entered, seen))

    def _left(
        self, entered: Entered, seen: list[torch.Tensor], sums: list[float], digests: list[int]
    ) -> None:
        record, observer = entered.record, self._observer
        came = "bad" if any(map(screen.suspect, sums[: entered.incoming])) else "ok"
        went = "ok"
        if any(map(screen.suspect, sums[entered.incoming :])):
            went = screen.worst([screen.state(tensor) for tensor in seen])
        record |= {"came": came, "went": went, "left": True}
        if digests:
            record["digest"] = sum(d * (31**i) for i, d in enumerate(digests)) % (1 << 64)
        observer.recorder.ring(entered.slot, record)
        if kept(record["step"]) or came == "bad" or went != "ok":
            observer.recorder.write("collective", **record)
        if went != "ok" and came == "ok":
            state: screen.State = went  # type: ignore[assignment]
            observer.worst = screen.worst([observer.worst, state])
            worst = max(seen, key=lambda tensor: screen.WORST.index(screen.state(tensor)))
            observer.tell(
                record["n"],
                (record["step"], "collective", record["layer"]),
                record["op"],
                state,
                "crossed",
                operands=[],
                output=screen.described(worst, "output"),
                again="",
                why="",
                during=record["during"],
                group=record["group"],
                seq=record["seq"],
            )

    def _ranks(self, named: dict[str, Any]) -> tuple[int, ...]:
        distributed = torch.distributed.distributed_c10d
        name = named.get("group_name", named.get("group"))
        if isinstance(name, str):
            if name not in self._groups:
                group = distributed._resolve_process_group(name)
                self._groups[name] = tuple(distributed.get_process_group_ranks(group))
            return self._groups[name]
        boxed = named.get("process_group")
        if boxed is None:
            return ()
        return _ranks_of(torch.distributed.ProcessGroup.unbox(boxed))


def _ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group; for one that is only known as an attribute of a group in
    Python, that group's ranks; else none."""
    known = torch.distributed.distributed_c10d._world.pg_group_ranks
    for outer, ranks in known.items():
        if outer is group or any(part is group for part in getattr(outer, "__dict__", {}).values()):
            return tuple(ranks)
    return ()


def _short(what: Operator) -> str:
    """The name without its namespace and underscores: ``allreduce`` for ``c10d.allreduce_``."""
    return what.name.rpartition(".")[2].strip("_")


def _ends(named: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that are sent and those that are received, by the names of the arguments."""
    incoming, outgoing = [], []
    for name, value in named.items():
        found = tensors(value)
        if name.startswith("out"):
            outgoing += found
        elif name.startswith(("input", "scatter_list")):
            incoming += found
        elif name.startswith("tensor"):
            incoming += found
            outgoing += found
    return incoming, outgoing


def _work(out: Any) -> Any:
    """The work object among the results of a c10d operator; None if there is none."""
    for item in out if isinstance(out, list | tuple) else [out]:
        if isinstance(item, torch.ScriptObject):
            return torch.distributed.Work.unbox(item)
    return None


def _root(named: dict[str, Any]) -> int | None:
    for name in ("root_rank", "src"):
        if isinstance(root := named.get(name), int):
            return root
    options = named.get("opts")
    root = getattr(options, "rootRank", None)
    return root if isinstance(root, int) and root >= 0 else None


def _memory(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "broadcast",
    "scatter",
    "gather",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
)


_SEEN: set[type] = set()


def see_python_groups(current: Callable[[], Collectives | None]) -> None:
    """Patch the collectives of process groups that are Python classes, and exist by now, so that
    they are recorded by the thread's ``current()``."""
    for kind in torch.distributed.ProcessGroup.__subclasses__():
        if kind in _SEEN:
            continue
        _SEEN.add(kind)
        for name in _METHODS:
            method = kind.__dict__.get(name)
            if inspect.isfunction(method):
                setattr(kind, name, _seen(method, name, current))


def _seen(method: Any, name: str, current: Callable[[], Collectives | None]) -> Any:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def seen(group: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = current()
        if collectives is None:
            return method(group, *args, **kwargs)
        bound = signature.bind(group, *args, **kwargs)
        bound.apply_defaults()
        _, *named = bound.arguments.items()
        call = functools.partial(method, group, *args, **kwargs)
        return collectives.called(call, name, group, dict(named))

    return seen
