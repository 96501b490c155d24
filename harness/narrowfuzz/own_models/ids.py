"""Token ids: which argument of a model holds them, and the size of its vocabulary.

Found by observing a forward, not by names: every lookup in an embedding table is recorded, and its
indices are compared with each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TABLES = (torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default)


@dataclass(frozen=True)
class Lookup:
    """One lookup in an embedding table: the table's number of rows, and the indices read."""

    rows: int
    ids: torch.Tensor

    def of(self, argument: torch.Tensor) -> bool:
        """True if the indices are the argument's values, in its order."""
        if argument.is_floating_point():
            return False
        flat = argument.reshape(-1).long()
        return self.ids.numel() == flat.numel() and torch.equal(self.ids, flat)


class _Lookups(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Lookup] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TABLES:
            table, ids = args[:2]
            self.found.append(Lookup(table.shape[0], ids.detach().reshape(-1).long().clone()))
        return func(*args, **(kwargs or {}))


@contextmanager
def lookups() -> Iterator[list[Lookup]]:
    """The lookups of the forwards that run inside."""
    with _Lookups() as mode:
        yield mode.found


def driven(given: Mapping[Any, Any], found: Sequence[Lookup]) -> Any:
    """Position or name of the argument that a case's input replaces. The first tensor argument that
    holds floats or indices of a lookup decides: floats are replaced; if it holds indices, the
    argument with those of the largest table. If there is neither, it is the first tensor."""
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    rows = {
        key: max((one.rows for one in found if one.of(value)), default=0)
        for key, value in tensors.items()
    }
    for key, value in tensors.items():
        if value.is_floating_point():
            return key
        if rows[key]:
            return max(rows, key=rows.__getitem__)
    return next(iter(tensors))


def vocabulary(
    example: torch.Tensor,
    found: Sequence[Lookup],
    again: Callable[[torch.Tensor], Sequence[Lookup]],
) -> int:
    """The number of ids that the example's argument may contain: the rows of the smallest table in
    which they are looked up unchanged; if there is none, the example's largest id plus one.
    ``again`` returns the lookups with other ids, which rules out tables of positions or token types
    whose indices happen to equal the example's ids."""
    tables = {one.rows for one in found if one.of(example)}
    other = other_ids(example)
    if len(tables) > 1:
        tables = {one.rows for one in again(other) if one.of(other)} or tables
    return min(tables, default=int(example.max()) + 1)


def other_ids(example: torch.Tensor) -> torch.Tensor:
    """Other valid ids of the same shape: the example's in another order, or if all are equal, with
    the first replaced by 0 or 1."""
    turned = example.reshape(-1).roll(1).reshape(example.shape)
    if not torch.equal(turned, example):
        return turned
    other = example.clone()
    other.view(-1)[0] = int(not other.view(-1)[0])
    return other
