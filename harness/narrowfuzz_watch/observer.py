"""Checks the results of every operator that one thread runs, and records bad values at once.

On a CPU an operator's results are checked as soon as it has run. On a GPU their sums stay on the
device, in the order of the operators, and are fetched together; until then operands and results
are held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowfuzz_watch import screen
from narrowfuzz_watch.again import Again, again, readable, results
from narrowfuzz_watch.operators import NO_NUMBERS, Operator, has_infinite_scalar, tensors
from narrowfuzz_watch.place import Place
from narrowfuzz_watch.recorder import Recorder
from narrowfuzz_watch.scratch import Scratch
from narrowfuzz_watch.screen import State

#: Operands that an operator overwrites are copied until its results have been checked, if they have
#: at most this many bytes in all.
_KEPT_BYTES = 4 << 20
#: Operators that never make +inf out of -inf; masks pass through them.
_KEEPS_SIGNS = {
    "aten.add.Tensor",
    "aten.add_.Tensor",
    "aten.where.self",
    "aten.clone",
    "aten._to_copy",
    "aten._softmax",
    "aten._log_softmax",
    "aten.amax",
    "aten.maximum",
}
#: On a GPU, this many operators are checked together.
_TOGETHER = 32
#: The number of different places with a bad value that are recorded; after that, operators are no
#: longer checked unless all digests are recorded, and collectives still are.
_MOST_EVENTS = 64


@dataclass(slots=True)
class Ran:
    """An operator whose results have not been checked yet."""

    number: int
    what: Operator
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]
    #: Copies of the operands that it overwrites, from before it ran, by the tensor's id.
    before: dict[int, torch.Tensor]
    #: If these operands were not copied: their worst state before it ran.
    before_state: State
    #: Step, phase and module, noted when it ran if its results are checked later.
    place: tuple[int, str, str] | None
    versions: list[int] = field(default_factory=list)


class Observer:
    """Checks the operators of one thread of training."""

    def __init__(self, folder: Path, full: bool) -> None:
        self.full = full
        self.place = Place()
        self.recorder = Recorder(folder)
        #: True while operators run that are not the program's own.
        self.quiet = False
        self.ran = self.checked = self.backwards = 0
        self.seconds = 0.0
        self.begun = 0.0
        self.worst: State = "ok"
        self._told: set[tuple[str, str, str, State]] = set()
        self._deliberate = False
        #: The backward pass whose loss was checked last, and whether a NaN loss was recorded.
        self._task = -1
        self._loss_told = False
        self._unwritten: dict[int, int] = {}
        self._scratch = Scratch(_KEPT_BYTES)
        self._queue: list[
            tuple[list[torch.Tensor], list[torch.Tensor], Callable[[list[float], list[int]], None]]
        ] = []

    @property
    def rank(self) -> int:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        from os import environ

        rank = environ.get("RANK", "")
        return int(rank) if rank.isdecimal() else 0

    @contextmanager
    def own(self) -> Iterator[None]:
        """A context whose operators are not the program's own, and are not checked."""
        quiet, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = quiet

    def operator(
        self, what: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator and check its results."""
        start = time.perf_counter()
        self.begun = self.begun or start
        ran = self._before(what, func, args, kwargs)
        middle = time.perf_counter()
        out = func(*args, **kwargs)
        after = time.perf_counter()
        if ran is not None:
            ran.results = results(what, args, kwargs, out)
            self._after(ran)
        self.seconds += time.perf_counter() - after + middle - start
        return out

    def _before(
        self, what: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ran | None:
        if torch._C._current_graph_task_id() == -1:
            if torch.is_grad_enabled():
                self.place.note()
        else:
            self.backwards += 1
            if self.worst != "ok" and not self._loss_told:
                self._see_loss()
        if what.kind == "skip" or (len(self._told) > _MOST_EVENTS and not self.full):
            return None
        self.ran += 1
        ran = Ran(self.ran, what, func, args, kwargs, [], {}, "ok", None)
        if what.rewrites:
            written = self._written(ran)
            if sum(item.nbytes for item in written) <= _KEPT_BYTES or self.full:
                ran.before = self._scratch.copies(written)
            elif not written[0].is_cuda:
                ran.before_state = screen.worst([screen.state(item) for item in written])
        return ran

    def _see_loss(self) -> None:
        """After a first bad value: record if the loss that this backward pass began with is NaN."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        with torch._C._AutoDispatchBelowAutograd(), self.own():
            loss = [item.detach() for item in self.place.loss()]
            if any(screen.state(item) == "nan" for item in loss):
                self._loss_told = True
                self.recorder.write("loss", rank=self.rank, step=self.place.step)

    def _written(self, ran: Ran) -> list[torch.Tensor]:
        return [
            tensor
            for position, name in ran.what.writes
            for tensor in tensors(
                ran.args[position] if position < len(ran.args) else ran.kwargs.get(name)
            )
        ]

    def _after(self, ran: Ran) -> None:
        if ran.what.kind == "unwritten":
            self._note_unwritten(ran.results)
            return
        with torch._C._AutoDispatchBelowAutograd():
            seen = [tensor for tensor in ran.results if screen.is_checkable(tensor)]
            if not seen:
                return
            self._note_written(ran, seen)
            on_gpu = seen[0].is_cuda
            if on_gpu and torch.cuda.is_current_stream_capturing():
                return
            self.checked += 1
            if self.full:
                self._record(ran)
            sums = [screen.total(tensor) for tensor in seen]
            if not on_gpu:
                self._judge_if_suspect(ran, [float(sum_) for sum_ in sums])
                return
            ran.place = self.place.now()
            ran.versions = _versions(ran)
            self.later(sums, [], lambda found, _: self._judge_if_suspect(ran, found))

    def _note_unwritten(self, made: list[torch.Tensor]) -> None:
        if len(self._unwritten) > 4096:
            self._unwritten.clear()
        for tensor in made:
            if isinstance(tensor, NO_NUMBERS):
                continue
            storage = tensor.untyped_storage()
            self._unwritten[storage.data_ptr()] = storage.nbytes()

    def _note_written(self, ran: Ran, seen: list[torch.Tensor]) -> None:
        """Note that memory is written now: memory that is new, or was written as a whole."""
        if self._unwritten:
            for tensor in seen:
                memory = tensor.untyped_storage()
                if not ran.what.writes or tensor.nbytes == memory.nbytes():
                    self._unwritten.pop(memory.data_ptr(), None)

    def _record(self, ran: Ran) -> None:
        step, phase, layer = self.place.now()
        operands = readable(ran.what, args_of(ran))
        read = [ran.before.get(id(item), item) for _, item in operands]
        self.recorder.write(
            "op",
            n=ran.number,
            rank=self.rank,
            step=step,
            phase=phase,
            layer=layer,
            op=ran.what.name,
            read=screen.digest(read),
            digest=screen.digest(ran.results),
        )

    def later(
        self,
        sums: list[torch.Tensor],
        digests: list[torch.Tensor],
        done: Callable[[list[float], list[int]], None],
    ) -> None:
        """Fetch these numbers and call ``done`` with them: on a CPU now, on a GPU with others."""
        self._queue.append((sums, digests, done))
        if not any(item.is_cuda for item in (*sums, *digests)) or len(self._queue) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Fetch and check everything in the queue."""
        queue, self._queue = self._queue, []
        found = _fetched([item for sums, _, _ in queue for item in sums], torch.float64)
        counted = _fetched([item for _, more, _ in queue for item in more], torch.int64)
        for sums, more, done in queue:
            done([found.pop(0) for _ in sums], [counted.pop(0) for _ in more])

    def _judge_if_suspect(self, ran: Ran, sums: list[float]) -> None:
        if any(map(screen.suspect, sums)):
            self._judge(ran)

    def _judge(self, ran: Ran) -> None:
        """Check an operator's results for bad values; record one that is new, with its origin."""
        states = [screen.state(tensor) for tensor in ran.results]
        bad = screen.worst(states)
        if bad == "ok":
            return
        if has_infinite_scalar(ran.args, ran.kwargs) and bad != "nan":
            self._deliberate = True
            return
        place = ran.place or self.place.now()
        key = (ran.what.name, place[2], place[1], bad)
        if key in self._told:
            return
        operands = readable(ran.what, args_of(ran))
        operands = [(name, ran.before.get(id(item), item)) for name, item in operands]
        came = [ran.before_state, *(screen.state(item) for _, item in operands)]
        if bad == "huge" and self._deliberate:
            came = [state for state in came if state != "inf"]
        came_in = screen.worst(came)
        made = screen.WORST.index(came_in) < screen.WORST.index(bad) or _new_infinity(ran, operands)
        if not made and self._known(bad, ran, operands):
            return
        self._told.add(key)
        self.worst = screen.worst([self.worst, bad])
        tried = again(ran.what, ran.func, ran.args, ran.kwargs, ran.before, ran.results)
        if ran.versions and ran.versions != _versions(ran):
            tried = Again("", "its operands were written over before it was checked")
        worst_result = ran.results[states.index(bad)]
        self.tell(
            ran.number,
            place,
            ran.what.name,
            bad,
            "made" if made else "given",
            operands=[
                screen.described(item, name)
                | {"state": screen.state(item), "unwritten": self._is_unwritten(item)}
                for name, item in operands
            ],
            output=screen.described(worst_result, "output"),
            again=tried.how if made else "",
            why=tried.why if made else "",
            lines=() if ran.place else self.place.lines(),
        )

    def _known(self, bad: State, ran: Ran, operands: list[tuple[str, torch.Tensor]]) -> bool:
        """True if a bad value that came in with the operands need not be recorded."""
        if screen.WORST.index(bad) <= screen.WORST.index(self.worst) or bad == "huge":
            return True
        if bad == "inf":
            # a mask's -inf may be given as a tensor with a single element
            self._deliberate |= all(
                item.dim() == 0 for _, item in operands if screen.state(item) == "inf"
            )
            if self._deliberate:
                return True
        # bad values in the unwritten rest of a buffer that is filled piece by piece
        partly = {id(item) for item in self._written(ran)}
        came = [item for _, item in readable(ran.what, args_of(ran)) if screen.state(item) == bad]
        return bool(came) and all(id(item) in partly and self._is_unwritten(item) for item in came)

    def _is_unwritten(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return False
        return tensor.untyped_storage().data_ptr() in self._unwritten

    def tell(
        self,
        number: int,
        place: tuple[int, str, str],
        name: str,
        bad: State,
        made: str,
        **more: Any,
    ) -> None:
        """Record that a bad value was seen."""
        step, phase, layer = place
        self.recorder.write(
            "event",
            n=number,
            rank=self.rank,
            step=step,
            phase=phase,
            layer=layer,
            op=name,
            bad=bad,
            made=made,
            **more,
        )

    def tally(self) -> None:
        """Record how much was checked, and how long that took."""
        self.recorder.write(
            "tally",
            rank=self.rank,
            step=self.place.step - 1,
            ran=self.ran,
            looked=self.checked,
            backward=self.backwards,
            own_seconds=self.seconds,
            seconds=time.perf_counter() - self.begun,
        )


def _new_infinity(ran: Ran, operands: list[tuple[str, torch.Tensor]]) -> bool:
    """True if an operator that keeps signs made +inf although its operands only had -inf, as masks
    do."""
    if ran.what.name not in _KEEPS_SIGNS:
        return False
    seen = [item for _, item in operands if screen.is_checkable(item)]
    return max(screen.ends(ran.results[0])) == torch.inf and not any(
        max(screen.ends(item)) == torch.inf for item in seen
    )


def _versions(ran: Ran) -> list[int]:
    """How often each operand has been written; 0 for tensors that do not count this."""
    operands = readable(ran.what, args_of(ran))
    return [0 if item.is_inference() else item._version for _, item in operands]


def args_of(ran: Ran) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ran.args, ran.kwargs


def _fetched(items: list[torch.Tensor], dtype: torch.dtype) -> list[Any]:
    if not items:
        return []
    device = items[-1].device
    together = torch.stack([item.to(device=device, dtype=dtype) for item in items])
    return list(together.tolist())
