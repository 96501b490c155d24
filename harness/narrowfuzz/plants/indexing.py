"""Faults in sums by index: terms that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced, of_operator


@contextmanager
def _summing(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``make(run)`` replaces the kernel, and the in-place one, which autograd calls without a
    dispatch mode."""
    in_place = "_index_put_impl_" if name == "index_put" else f"{name}_"
    with kernel_replaced(name, make), kernel_replaced(in_place, partial(_in_place, make)):
        yield


def _in_place(make: Callable[[Any], Any], run: Any) -> Any:
    wrong = make(lambda base, *args, **options: run(base.clone(), *args, **options))
    return lambda base, *args, **options: base.copy_(wrong(base, *args, **options))


def _first_of_repeats(run: Any) -> Any:
    """Of several rows with one index, only the first is added."""
    import torch

    def put(base: Any, indices: Any, values: Any, accumulate: bool = False, *how: bool) -> Any:
        ids = indices[0]
        if not accumulate or len(indices) != 1 or ids.dim() != 1:
            return run(base, indices, values, accumulate, *how)
        earlier = torch.tril(ids[:, None] == ids[None, :], -1).any(1)
        first = ~earlier.reshape(-1, *[1] * (values.dim() - 1))
        return run(base, indices, values * first, accumulate, *how)

    return put


def _last_block(run: Any) -> Any:
    """Of more than 16 rows, those after the last full block of eight are left out."""

    def add(base: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
        rows = index.numel()
        kept = rows - rows % 8 if rows > 16 else rows
        return run(base, dim, index[:kept], source.narrow(dim, 0, kept), alpha=alpha)

    return add


def _first_group_starts_again(run: Any) -> Any:
    """Index 0 starts again from zero halfway: its sum has only the second half of the rows."""

    def add(base: Any, dim: int, index: Any, source: Any) -> Any:
        half = index.shape[dim] // 2
        later = (index.narrow(dim, half, index.shape[dim] - half) == 0).any()
        if dim or not half or not later:
            return run(base, dim, index, source)
        before = run(base, dim, index[:half], source[:half])
        before[0] = 0.0
        return run(before, dim, index[half:], source[half:])

    return add


PLANTS = [
    of_operator(
        "index-put-adds-first-alone",
        "gradient",
        "of rows that are accumulated at one index only the first is added",
        "the class of writes that race without atomics",
        plant=partial(_summing, "index_put", _first_of_repeats),
        operator="index_put",
    ),
    of_operator(
        "index-add-drops-ragged-tail",
        "gradient",
        "rows behind the last eight are not added up by index_add",
        "the class of loads by whole vectors",
        plant=partial(_summing, "index_add", _last_block),
        operator="index_add",
    ),
    of_operator(
        "scatter-add-starts-again",
        "gradient",
        "scatter_add begins again from 0 at the first place halfway through",
        "the class of partial sums of which the last one is stored",
        plant=partial(_summing, "scatter_add", _first_group_starts_again),
        operator="scatter_add",
    ),
]
