"""Token ids: which argument holds them, and how many there are.

Asked of a forward, not of names: every look into a table of embeddings is seen, and what is looked
up is held beside each argument.
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
    """One look into a table: how many rows that has, and the numbers of those that were read."""

    rows: int
    ids: torch.Tensor

    def of(self, argument: torch.Tensor) -> bool:
        """True if these are the argument's values, in its order."""
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
    """Those of the forwards that run inside."""
    with _Lookups() as mode:
        yield mode.found


def driven(given: Mapping[Any, Any], found: Sequence[Lookup]) -> Any:
    """Place or name of what a case's input takes the place of: the first argument that holds floats
    or ids that are looked up, and of such ids those of the largest table; where there is neither,
    the first tensor."""
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
    """How many ids the example's argument may hold: the rows of the smallest table that they are
    looked up in as they are. ``again``: the lookups with other ids, by which positions and kinds
    that happen to be the example's ids are told from these. Where no table has them, those up to
    the example's largest."""
    tables = {one.rows for one in found if one.of(example)}
    other = _others(example)
    if len(tables) > 1:
        tables = {one.rows for one in again(other) if one.of(other)} or tables
    return min(tables, default=int(example.max()) + 1)


def _others(example: torch.Tensor) -> torch.Tensor:
    """Ids of which each is among the example's, or 0 or 1, in another order."""
    turned = example.reshape(-1).roll(1).reshape(example.shape)
    if not torch.equal(turned, example):
        return turned
    other = example.clone()
    other.view(-1)[0] = int(not other.view(-1)[0])
    return other
