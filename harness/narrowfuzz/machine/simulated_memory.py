"""The memory of a simulated GPU: which tensors the host may read, and how often the host waits for
the device.

Tensors of host and device both live in the CPU's memory, so they are distinguished by who allocated
it: memory that torch allocated is the device's, and memory that numpy allocated is the host's. A
copy by ``Tensor.cpu`` therefore gets numpy's memory here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Name of a function -> how often the host has waited for the device in it.
waits: Counter[str] = Counter()
#: Methods of Tensor that make the host wait for the device.
_ASKING = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")


def guard() -> None:
    """Patch torch so that ``Tensor.numpy`` refuses tensors of the device (call ``Tensor.cpu``
    first) and every wait of the host for the device is counted in ``waits``."""
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
        # contiguous, so that its bytes can be viewed
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
    """Waits inside this block do not count: a real GPU would do the block's work by itself."""
    before = Counter(waits)
    try:
        yield
    finally:
        waits.clear()
        waits.update(before)


def _on_device(t: torch.Tensor) -> bool:
    """True if the tensor's memory is torch's own; False for tensors without elements."""
    return bool(t.numel() and t.untyped_storage().resizable())


def _counted(name: str, method: Any) -> Any:
    def counted(t: torch.Tensor, *args: Any) -> Any:
        if _on_device(t):
            waits[name] += 1
        return method(t, *args)

    return counted
