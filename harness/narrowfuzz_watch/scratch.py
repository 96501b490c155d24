"""Memory that is reused for each operator, so that copies of overwritten operands need no new
pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_MOST_VIEWS = 1024
_ALIGNED = 64


class Scratch:
    """``size`` bytes of CPU memory, for one thread of training."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory: torch.Tensor | None = None
        #: (offset, dtype, shape, strides) -> view of the memory; None: such a tensor does not fit,
        #: or has gaps or overlaps.
        self._views: dict[tuple[Any, ...], torch.Tensor | None] = {}

    def copies(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Id -> copy of each tensor, with the same strides; copies are valid until the next call.
        If a tensor is on a GPU, results are checked later, so the copies get memory of their own.
        """
        found, start = {}, 0
        at_once = all(tensor.is_cpu for tensor in tensors)
        with torch._C._AutoDispatchBelowAutograd():
            for tensor in tensors:
                view = None
                if at_once and tensor.layout is torch.strided:
                    key = (start, tensor.dtype, tensor.shape, tensor.stride())
                    view = self._views[key] if key in self._views else self._view(key, tensor)
                if view is None:
                    found[id(tensor)] = tensor.clone()
                else:
                    found[id(tensor)] = view.copy_(tensor)
                    start += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return found

    def _view(self, key: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor | None:
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        start, dtype, shape, strides = key
        reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        view = None
        # a tensor with gaps or overlaps spans another number of elements than it has
        if reach == tensor.numel() and start + tensor.nbytes <= self._size:
            with torch.inference_mode(False):
                if self._memory is None:
                    self._memory = torch.empty(self._size, dtype=torch.uint8)
                place = self._memory[start : start + tensor.nbytes].view(dtype)
                view = place.as_strided(shape, strides, place.storage_offset())
        self._views[key] = view
        return view
