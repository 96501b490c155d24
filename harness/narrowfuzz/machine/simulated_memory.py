"""The memory of a simulated GPU: what may be read on the host, and how often that waits for it.

Both live in the CPU's memory, so they are told apart by who made it: torch allocates what is on the
device, and what is on the host is numpy's, as a copy by ``Tensor.cpu`` is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: How often the host has waited for the device, by what it asked for.
waits: Counter[str] = Counter()
#: Methods whose answer the host waits for.
_ASKING = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")


def guard() -> None:
    """From now on only what ``Tensor.cpu`` returned becomes numpy, and every wait is counted."""
    to_numpy, to_host = torch.Tensor.numpy, torch.Tensor.cpu

    def numpy(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _on_device(t):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return to_numpy(t, *args, **kwargs)

    def cpu(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if t.requires_grad or type(t) is not torch.Tensor or not _on_device(t):
            return to_host(t, *args, **kwargs)
        waits["cpu"] += 1
        # a clone has the strides of its shape
        raw = t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        return torch.from_numpy(to_numpy(raw).copy()).view(t.dtype).reshape(t.shape)

    def synchronize(device: Any = None) -> None:
        waits["synchronize"] += 1

    torch.cuda.synchronize = synchronize
    torch.Tensor.numpy, torch.Tensor.cpu = numpy, cpu  # type: ignore[assignment, method-assign]
    for name in _ASKING:
        setattr(torch.Tensor, name, _counted(name, getattr(torch.Tensor, name)))


@contextmanager
def uncounted() -> Iterator[None]:
    """What happens in here, a GPU does by itself."""
    before = Counter(waits)
    try:
        yield
    finally:
        waits.clear()
        waits.update(before)


def _on_device(t: torch.Tensor) -> bool:
    """True for memory of torch's own; nothing is nowhere."""
    return bool(t.numel() and t.untyped_storage().resizable())


def _counted(name: str, method: Any) -> Any:
    def asked(t: torch.Tensor, *args: Any) -> Any:
        if _on_device(t):
            waits[name] += 1
        return method(t, *args)

    return asked
