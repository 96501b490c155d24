"""``make watch-trials``: bad values are injected into random operators of random ranks. ``watch``
must name the rank, operator and collective, and distinguish a transient fault from one that the
operator repeats.

Four ranks train a small model, FSDP2 and tensor parallelism 2 x 2. A NaN, an infinity or a flipped
bit is injected once (as by hardware) or whenever the operator gets the same operands (as by
software). Exit code 0: everything was named correctly; 1: something was not.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narrowfuzz
import torch
from narrowfuzz_watch.against import divergence
from narrowfuzz_watch.read import read, report_of
from narrowfuzz_watch.records import FirstBad, Report
from torch.utils._python_dispatch import TorchDispatchMode
from watch_model import RANKS, threads, train

#: Kind of injected value -> whether it is visible as a bad number.
SHOWS = {"nan": True, "inf": True, "high bit": True, "low bit": False}
_BITS = {torch.float32: (torch.int32, 30, 9), torch.bfloat16: (torch.int16, 14, 1)}
_LOCAL = threading.local()


@dataclass
class Put:
    """A bad value to inject, and where it was injected and sent."""

    what: str
    rank: int
    #: The number of operators that the rank runs before the injection.
    after: int
    lasting: bool
    operator: str = ""
    #: The first collective into which the value was sent: its name, the ranks of its group.
    through: tuple[str, tuple[int, ...]] | None = None
    operands: list[torch.Tensor] = field(default_factory=list)
    place: tuple[int, int] = (0, 0)


class Injector(TorchDispatchMode):
    """A dispatch mode that injects the value. It runs below ``watch``, like the operators
    themselves."""

    def __init__(self, put: Put | None, *, watched: bool) -> None:
        super().__init__()
        self.put = put
        #: True if ``watch`` runs above: its own computations are no targets. They do not arrive as
        #: calls of operator objects.
        self.watched = watched
        self.ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = func._schema.name
        if types or names.startswith(("prim", "profiler")):
            return func(*args, **kwargs)
        if "c10d" in names:
            with _inside(names.rpartition(":")[2], args[-1], _flat(args), self.put):
                return func(*args, **kwargs)
        put = self.put
        if not _numeric(func) or (self.watched and not _forwarded()):
            return func(*args, **kwargs)
        if put is None:
            self.ran += 1
            return func(*args, **kwargs)
        before = [item.clone() for item in _flat(_read(func, args, kwargs))]
        out = func(*args, **kwargs)
        self.ran += 1
        made = _made(func, args, kwargs, out)
        if put.operator and put.lasting:
            self._again(put, str(func), before, made)
        elif not put.operator and self.ran > put.after:
            self._first(put, str(func), before, made)
        return out

    def _first(
        self, put: Put, name: str, before: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        choice = random.Random(put.after)
        for number, tensor in enumerate(made):
            flat = tensor.reshape(-1)
            if tensor.dtype not in _BITS or flat.data_ptr() != tensor.data_ptr():
                continue
            if not flat.numel() or not bool(torch.isfinite(flat).all()):
                continue
            for at in choice.sample(range(flat.numel()), min(8, flat.numel())):
                changed = _changed(put.what, flat[at].clone())
                if changed is not None:
                    flat[at] = changed
                    put.operator, put.place = name.removesuffix(".default"), (number, at)
                    put.operands = before
                    return

    def _again(
        self, put: Put, name: str, before: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        same = len(before) == len(put.operands) and all(
            a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip(before, put.operands, strict=True)
        )
        if same and name.removesuffix(".default") == put.operator:
            number, at = put.place
            flat = made[number].reshape(-1)
            changed = _changed(put.what, flat[at].clone())
            if changed is not None:
                flat[at] = changed


def _forwarded() -> bool:
    """True if the operator was called as an object by ``watch``, that is, passed on or rerun."""
    frame = sys._getframe(2)
    between = ("eval_frame.py", "_compile.py")  # wrappers that keep torch.compile out of a mode
    while frame.f_code.co_filename.endswith(between) and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_back
    by_object = frame.f_code.co_filename == torch._ops.__file__
    # the functions in which watch runs a program's operator, or runs it again; other calls are its
    # own computations
    return by_object and caller is not None and caller.f_code.co_name in ("operator", "again")


def _changed(what: str, value: torch.Tensor) -> torch.Tensor | None:
    """The bad value that replaces ``value``; None if it would not be bad as ``what`` requires."""
    if what in ("nan", "inf"):
        return torch.full_like(value, float(what))
    integer, high, low = _BITS[value.dtype]
    flipped = (value.view(integer) ^ (1 << (high if what == "high bit" else low))).view(value.dtype)
    ordinary = bool(torch.isfinite(flipped)) and abs(float(flipped)) < 2.0**64
    return flipped if ordinary != SHOWS[what] and not torch.equal(flipped, value) else None


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _flat(item)] if isinstance(value, list | tuple) else []


def _numeric(func: Any) -> bool:
    """True if the operator computes tensors from tensors, in new memory or in an operand that it
    writes: not for views and uninitialised memory."""
    schema = func._schema
    if "empty" in schema.name or schema.name in ("aten::set_", "fsdp::all_gather_copy_in"):
        return False
    reads = [a for a in schema.arguments if "Tensor" in str(a.type)]
    views = [r.alias_info for r in schema.returns if r.alias_info is not None]
    if schema.name in ("aten::_unsafe_view", "aten::_reshape_alias"):
        return False
    return bool(reads) and not any(not alias.is_write for alias in views)


def _read(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operator reads: without the ones that a copy or fill overwrites."""
    if not any(word in func._schema.name for word in ("copy", "chunk_cat", "fill_", "zero_")):
        return [*args, *kwargs.values()]
    written = {a.name for a in func._schema.arguments if a.alias_info is not None}
    named = {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    return [value for name, value in named.items() if name not in written]


def _made(func: Any, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
    written = [
        tensor
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _flat(args[position] if position < len(args) else kwargs[argument.name])
    ]
    return written or _flat(out)


@contextmanager
def _inside(name: str, group: Any, sent: list[torch.Tensor], put: Put | None) -> Iterator[None]:
    """A context in which a collective runs on this rank. Records it in ``put`` if it is the first
    into which the bad value is sent."""
    outer = getattr(_LOCAL, "inside", False)
    _LOCAL.inside = True
    try:
        if put is not None and put.operator and put.through is None and not outer:
            bad = [t for t in sent if t.is_floating_point() and not bool((t.abs() < 2.0**64).all())]
            if bad and name != "wait_tensor":
                if isinstance(group, str):
                    group = torch.distributed.distributed_c10d._resolve_process_group(group)
                ranks = tuple(torch.distributed.get_process_group_ranks(group))
                put.through = name, ranks
        yield
    finally:
        _LOCAL.inside = outer


def note_collectives() -> None:
    """Patch the collectives of the threaded group, which are Python calls, to record which of them
    send the bad value, independently of ``watch``'s code."""
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup as Group

    def noted(name: str, at: int) -> Any:
        method = getattr(Group, name)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            sent = _flat([[*args, *kwargs.values()][at]])
            with _inside(name, self, sent, getattr(_LOCAL, "put", None)):
                return method(self, *args, **kwargs)

        return call

    for name, at in {
        "allreduce": 0, "allgather": 1, "all_gather_single": 1, "reduce_scatter": 1,
        "reduce_scatter_single": 1, "broadcast": 0,
    }.items():  # fmt: skip
        setattr(Group, name, noted(name, at))


def trial(put: Put, dtype: torch.dtype, folder: Path, *, full: bool = False) -> Report:
    """Run one training with ``put`` injected. Returns ``watch``'s report."""

    @contextmanager
    def around(rank: int) -> Iterator[None]:
        mine = put if rank == put.rank else None
        _LOCAL.put = mine
        with Injector(mine, watched=True), narrowfuzz.watch(out=folder, full=full):
            yield

    threads(lambda: train(dtype, around))
    return report_of(read(folder), None, None)


def operators(dtype: torch.dtype) -> int:
    """The number of operators into which a value could be injected, the minimum over ranks."""
    counts: list[Injector] = []

    def around(rank: int) -> AbstractContextManager[Any]:
        counts.append(Injector(None, watched=False))
        return counts[-1]

    threads(lambda: train(dtype, around))
    return min(injector.ran for injector in counts)


def named(put: Put, first: FirstBad | None) -> str:
    """How the report differs from the injection; "" if it does not."""
    if first is None:
        return "nothing was found"
    wrong = []
    if first.at.rank != put.rank:
        wrong.append(f"rank {first.at.rank}")
    if first.at.name != put.operator:
        wrong.append(f"operator {first.at.name}")
    through = first.through and (first.through.op, first.through.group)
    if (through or None) != put.through:
        wrong.append(f"collective {through} instead of {put.through}")
    return ", ".join(wrong)


def run(count: int, seed: int) -> bool:
    """Run all trials and print the results. Returns True if everything was named and attributed
    correctly."""
    draw = random.Random(seed)
    sizes = {dtype: operators(dtype) for dtype in _BITS}
    good = True
    for lasting in (False, True):
        kind = "software" if lasting else "hardware"
        right: Counter[str] = Counter()
        for number in range(count):
            dtype = draw.choice([*_BITS])
            what = draw.choice([what for what, shows in SHOWS.items() if shows])
            put = Put(what, draw.randrange(RANKS), draw.randrange(sizes[dtype] - 40), lasting)
            with tempfile.TemporaryDirectory() as folder:
                first = trial(put, dtype, Path(folder)).first
            wrong = named(put, first)
            right["named"] += not wrong
            cause = "unknown" if first is None else first.cause
            right[cause.partition(" ")[0]] += 1
            suffix = f"; {wrong}" if wrong else ""
            if wrong or not cause.startswith(kind):
                because = "" if first is None else first.because
                print(f"  {number}: {what} in {put.operator}, rank {put.rank}, {dtype}: {cause} "
                      f"({because}){suffix}")  # fmt: skip
        attributed = count - right["unknown"]
        print(
            f"{kind}: {right['named']} of {count} named, {right[kind]} of {attributed} that could "
            f"be attributed told as {kind}, {right['unknown']} not attributed"
        )
        good &= right["named"] == count and right[kind] == attributed
    return silent(count // 2, draw, sizes) and good


def silent(count: int, draw: random.Random, sizes: dict[torch.dtype, int]) -> bool:
    """Trials with low bits flipped once, which only show against another run of the same training,
    and some in a vote of replicas. Returns True if all were named and attributed to hardware."""
    right: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        clean = {}
        for dtype in _BITS:
            folder = Path(home) / str(dtype)
            trial(Put("nan", 0, 1 << 60, False), dtype, folder, full=True)
            clean[dtype] = read(folder)
        for number in range(count):
            dtype = draw.choice([*_BITS])
            put = Put("low bit", draw.randrange(RANKS), draw.randrange(sizes[dtype] - 40), False)
            folder = Path(home) / str(number)
            report = trial(put, dtype, folder, full=True)
            first = divergence(read(folder), clean[dtype])
            right["voted"] += bool(report.votes)
            if first is None:
                wrong = "nothing was found"
            else:
                wrong = ", ".join(
                    [f"rank {first.at.rank}"] * (first.at.rank != put.rank)
                    + [f"operator {first.at.name}"] * (first.at.name != put.operator)
                )
                right["named"] += not wrong
                if first.cause.startswith("hardware"):
                    right["hardware"] += 1
                else:
                    wrong = wrong or f"{first.cause}: {first.because}"
            if wrong:
                print(f"  {number}: low bit in {put.operator}, rank {put.rank}, {dtype}: {wrong}")
    print(
        f"silent: {right['named']} of {count} named beside another run, {right['hardware']} told "
        f"as hardware; replicas alone show {right['voted']}, the others cannot be attributed"
    )
    return right["named"] == right["hardware"] == count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="trials of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    note_collectives()
    return 0 if run(args.count, args.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
