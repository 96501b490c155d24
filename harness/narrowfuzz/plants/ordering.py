"""Faults in topk and sort."""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced, of_operator


def _without_last(run: Any) -> Any:
    """The last of more than 16 numbers is never chosen."""

    def topk(x: Any, count: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
        size = x.shape[dim]
        seen = x.narrow(dim, 0, size - 1) if size > 16 and count < size else x
        return run(seen, count, dim, largest, in_order)

    return topk


def _twice(run: Any) -> Any:
    """For equal numbers, the index of the first is returned for each."""

    def topk(x: Any, count: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
        values, places = run(x, count, dim, largest, in_order)
        rows = dim in (-1, x.ndim - 1)
        if rows:
            places = (x.unsqueeze(-2) == values.unsqueeze(-1)).int().argmax(-1)
        return values, places

    return topk


def _unstable(run: Any) -> Any:
    """Equal numbers are sorted in reverse of their original order."""

    def sort(x: Any, stable: Any, dim: int = -1, descending: bool = False) -> Any:
        values, places = run(x.flip(dim), stable=stable, dim=dim, descending=descending)
        return values, x.shape[dim] - 1 - places

    def kernel(x: Any, *, stable: Any, dim: int = -1, descending: bool = False) -> Any:
        return sort(x, stable, dim, descending)

    return kernel


PLANTS = [
    of_operator(
        id, "experts", title, source, partial(kernel_replaced, kernel, make), operator=operator
    )
    for id, title, source, kernel, make, operator in (
        (
            "topk-misses-last",
            "the last of more than 16 numbers is never among the largest",
            "the class of tails that a loop leaves out",
            "topk",
            _without_last,
            "topk",
        ),
        (
            "topk-names-first-twice",
            "of equal numbers the first is chosen for all",
            "the class of ties in a router",
            "topk",
            _twice,
            "topk",
        ),
        (
            "sort-reverses-equal",
            "a stable sort has equal numbers from the last to the first",
            "the class of routers whose sort is not stable",
            "sort.stable",
            _unstable,
            "sort",
        ),
    )
]
