"""Checks that a kernel reads and writes nothing but the memory of its arguments.

On a GPU a store outside a tensor overwrites other memory or ends the process; the interpreter's
stores do too. Here every address is compared with the memory of the launch's arguments before it is
used: a store outside raises OutsideError, and a load outside gives NaN, which has no effect if no
result depends on it. WrittenTwiceError is raised if two programs of a launch, or two lanes of one
store, write different values to one address: on a GPU it is undefined which of them stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


class OutsideError(IndexError):
    """A kernel writes outside of the memory of its arguments."""


class WrittenTwiceError(RuntimeError):
    """The result of a kernel depends on the order of its programs or lanes."""


@dataclass(frozen=True)
class Memory:
    """The addresses of one argument's storage, from ``begin`` to ``end`` (exclusive)."""

    name: str
    begin: int
    end: int


class Launch:
    """The arguments of the running kernel. There is only one at a time, as Triton's interpreter
    allows no more."""

    def __init__(self) -> None:
        self.kernel = ""
        self.arguments: list[Memory] = []
        #: Argument -> for each of its bytes, the number (from 1) of the program that wrote it, or
        #: 0.
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
        """Find accesses outside of the arguments. Each address in ``mask`` is that of ``size``
        bytes. Returns None if one argument contains all of them; otherwise a mask of those that are
        not in the argument that contains most of them, and that argument."""
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
        """Raise OutsideError if ``outside`` finds an access."""
        found = self.outside(addresses, mask, size)
        if found is None:
            return
        beyond, one = found
        used = np.asarray(addresses).astype(np.int64)[beyond] - one.begin
        raise OutsideError(
            f"{self.kernel} writes {used.size * size} bytes outside of {one.name}: from byte "
            f"{used.min()} to byte {used.max() + size} of {one.end - one.begin}"
        )

    def claim(self, addresses: Any, mask: Any, program: int) -> Any:
        """Record these addresses, all of one argument, as written by ``program``. Returns a mask of
        those that another program has written before."""
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

    def written_twice_error(self, addresses: Any, lost: Any) -> WrittenTwiceError:
        """The error for the addresses in the mask ``lost``, to which two values were written."""
        at = int(np.asarray(addresses).astype(np.int64)[lost][0])
        one = next(one for one in self.arguments if one.begin <= at < one.end)
        return WrittenTwiceError(
            f"{self.kernel} writes {int(lost.sum())} numbers of {one.name} twice, with different "
            "values"
        )


def _memory(name: str, x: torch.Tensor) -> Memory:
    storage = x.untyped_storage()
    return Memory(name, storage.data_ptr(), storage.data_ptr() + storage.nbytes())


#: The launch that is running in this process.
LAUNCH = Launch()


class PoisonedTorch:
    """A stand-in for torch in a module that launches kernels. Tensors from ``empty`` have all bits
    set, which is NaN in floating-point formats that have NaN, and the CPU has the properties of a
    GPU with one multiprocessor."""

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
    """The device properties that kernels read."""

    multi_processor_count: int = 1


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """``x`` with all bits of its storage set, if it is on the CPU: elements that a kernel forgets
    to write are then NaN, or -1, and never old contents."""
    storage = x.untyped_storage()
    if x.device.type == "cpu" and storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
    return x


def use_poisoned_torch(module: Any, **replaced: Any) -> None:
    """Replace ``torch`` in a module that launches kernels by ``PoisonedTorch``, in which
    ``replaced`` overrides functions of torch. A second call does nothing."""
    if not isinstance(module.torch, PoisonedTorch):
        module.torch = PoisonedTorch(**replaced)


#: The former name of ``use_poisoned_torch``, deprecated; older scripts import it.
adapt = use_poisoned_torch
