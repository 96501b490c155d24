"""A kernel reads and writes its arguments and nothing else.

On a GPU a store beside a tensor changes what lies there, or ends the process; the interpreter's
stores are real as well. Here every address is compared with the memory of the launch's arguments
before it is used: a store outside raises OutsideError, and a load outside gives NaN, which does not
show where the kernel lets nothing depend on it. Nor may two programs of a launch, or two lanes of
one store, write different values to one address: which of them stays is undefined on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


class OutsideError(IndexError):
    """A kernel writes outside of the argument that it writes to."""


class WrittenTwiceError(RuntimeError):
    """What a kernel leaves in its argument hangs on the order of its programs or lanes."""


@dataclass(frozen=True)
class Memory:
    """What one argument's storage takes: addresses from ``begin`` to before ``end``."""

    name: str
    begin: int
    end: int


class Launch:
    """The arguments of the kernel that runs: one at a time, for Triton's interpreter allows but
    one."""

    def __init__(self) -> None:
        self.kernel = ""
        self.arguments: list[Memory] = []
        #: Of each byte of an argument that was written, by which program of the launch, from 1 on.
        self._writers: dict[Memory, Any] = {}

    @contextmanager
    def of(self, kernel: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        before = self.kernel, self.arguments, self._writers
        self.kernel, self._writers = kernel, {}
        self.arguments = [
            _memory(name, x) for name, x in arguments.items() if isinstance(x, torch.Tensor)
        ]
        try:
            yield
        finally:
            self.kernel, self.arguments, self._writers = before

    def outside(self, addresses: Any, mask: Any, size: int) -> tuple[Any, Memory] | None:
        """Which of the addresses, of ``size`` bytes each and not masked out, the argument that most
        of them are in does not hold, and that argument. None where it holds them all."""
        where = np.asarray(addresses).astype(np.int64)
        mask = np.broadcast_to(np.asarray(mask, dtype=bool), where.shape)
        used = where[mask]
        if not used.size or not self.arguments:
            return None
        first, last = int(used.min()), int(used.max()) + size
        if any(one.begin <= first and last <= one.end for one in self.arguments):
            return None
        held = {one: (where >= one.begin) & (where + size <= one.end) for one in self.arguments}
        most = max(self.arguments, key=lambda one: int((held[one] & mask).sum()))
        return mask & ~held[most], most

    def check_written(self, addresses: Any, mask: Any, size: int) -> None:
        """Raises OutsideError where ``outside`` finds anything."""
        found = self.outside(addresses, mask, size)
        if found is None:
            return
        beyond, one = found
        used = np.asarray(addresses).astype(np.int64)[beyond] - one.begin
        raise OutsideError(
            f"{self.kernel} writes {used.size * size} bytes outside of {one.name}: from byte "
            f"{used.min()} to byte {used.max() + size} of {one.end - one.begin}"
        )

    def of_others(self, addresses: Any, mask: Any, program: int) -> Any:
        """Which of these addresses, all in one argument's memory, another program has written;
        they are ``program``'s from here on."""
        where = np.asarray(addresses).astype(np.int64)
        mask = np.broadcast_to(np.asarray(mask, dtype=bool), where.shape)
        others = np.zeros(where.shape, bool)
        if not mask.any():
            return others
        first = int(where[mask][0])
        one = next(one for one in self.arguments if one.begin <= first < one.end)
        writers = self._writers.setdefault(one, np.zeros(one.end - one.begin, np.int32))
        at = where[mask] - one.begin
        others[mask] = (writers[at] != 0) & (writers[at] != program)
        writers[at] = program
        return others

    def twice(self, addresses: Any, lost: Any) -> WrittenTwiceError:
        """The error for numbers that are ``lost``: other values were, or are, written there."""
        at = int(np.asarray(addresses).astype(np.int64)[lost][0])
        one = next(one for one in self.arguments if one.begin <= at < one.end)
        return WrittenTwiceError(
            f"{self.kernel} writes {int(lost.sum())} numbers of {one.name} twice, with different "
            "values"
        )


def _memory(name: str, x: torch.Tensor) -> Memory:
    storage = x.untyped_storage()
    return Memory(name, storage.data_ptr(), storage.data_ptr() + storage.nbytes())


#: The launch that runs in this process.
LAUNCH = Launch()


class PoisonedTorch:
    """torch as a module sees it that launches kernels: what ``empty`` makes holds NaN, in
    every format of numbers all bits of which may be 1, and a CPU is a GPU of one multiprocessor."""

    cuda: Any

    def __init__(self, **replaced: Any) -> None:
        self.cuda = _Cuda()
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **how: Any) -> torch.Tensor:
        return poisoned(torch.empty(*size, **how))

    def empty_like(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return poisoned(torch.empty_like(x, **how))


class _Cuda:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def get_device_properties(self, device: Any) -> Any:
        if torch.device(device).type == "cpu":
            return _Properties()
        return torch.cuda.get_device_properties(device)


@dataclass(frozen=True)
class _Properties:
    """What kernels ask of a device."""

    multi_processor_count: int = 1


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """All bits set: what a kernel forgets to write is NaN, or -1, and never what lay there
    before."""
    storage = x.untyped_storage()
    if x.device.type == "cpu" and storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
    return x


def adapt(module: Any, **replaced: Any) -> None:
    """Let a module whose functions launch kernels see ``PoisonedTorch``, and these functions in
    place of torch's. Twice does no more."""
    if not isinstance(module.torch, PoisonedTorch):
        module.torch = PoisonedTorch(**replaced)
