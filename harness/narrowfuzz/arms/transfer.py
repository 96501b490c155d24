"""Copies records of tensors from a device to the host in one transfer.

Reading a GPU's tensors one by one would wait for the GPU each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

#: Alignment of tensors in the copy, in bytes: the size of the largest element.
_ALIGNED = 16
Tensors = dict[int, torch.Tensor]


def on_host(held: Any) -> Any:
    """The same lists, tuples, dicts and dataclasses, with all tensors on the host. Tensors of a
    library's own class are not copied."""
    live = {id(t): t.detach() for t in _tensors(held)}
    if not live:
        return held
    starts, end = {}, 0
    for name, t in live.items():
        starts[name] = end
        end += -(-t.numel() * t.element_size() // _ALIGNED) * _ALIGNED
    some = next(iter(live.values()))
    whole = torch.empty(end, dtype=torch.uint8, device=some.device)
    for name, t in live.items():
        if t.numel():
            whole[starts[name] :][: t.numel() * t.element_size()] = _bytes(t)
    copy = whole.cpu()
    return _rebuilt(held, {name: _from(copy[starts[name] :], t) for name, t in live.items()})


def _bytes(t: torch.Tensor) -> torch.Tensor:
    # a clone has the strides of its shape, also where a dimension is one
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _from(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same dtype and shape from the first of these bytes."""
    size = like.numel() * like.element_size()
    if not size:
        return raw[:0].to(like.dtype).reshape(like.shape)
    return raw[:size].view(like.dtype).reshape(like.shape)


def _is_plain(x: Any) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if _is_plain(x):
        yield x
    for part in _parts(x):
        yield from _tensors(part)


def _parts(x: Any) -> Iterator[Any]:
    if isinstance(x, Mapping):
        yield from x.values()
    elif isinstance(x, list | tuple):
        yield from x
    elif _is_record(x):
        yield from (getattr(x, field.name) for field in fields(x))


def _rebuilt(x: Any, moved: Tensors) -> Any:
    again: Callable[[Any], Any] = lambda part: _rebuilt(part, moved)  # noqa: E731
    if _is_plain(x):
        return moved[id(x)]
    if isinstance(x, Mapping):
        return {name: again(part) for name, part in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(map(again, x))
    if _is_record(x):
        return replace(x, **{f.name: again(getattr(x, f.name)) for f in fields(x)})
    return x


def _is_record(x: Any) -> bool:
    return is_dataclass(x) and not isinstance(x, type)
