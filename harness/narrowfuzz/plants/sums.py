"""The product of two matrices with its sums in another order or a wider dtype."""

from __future__ import annotations

from typing import Any

_BLOCK = 16

#: Reasons why another order and a wider accumulator are legal, for ``Plant.source``.
ANY_ORDER = "bound 3.2 holds for any order of sums: docs/rules.md, Bounds"
WIDER = "a wider accumulator errs less than gamma_n allows: docs/rules.md, Bounds"


def reversed_sum(a: Any, b: Any) -> Any:
    """Summed over the contracted axis from its last element to its first."""
    return a.flip(1) @ b.flip(0)


def blocked(a: Any, b: Any) -> Any:
    """Summed as partial sums of 16 products, added one after the other."""
    total = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], _BLOCK):
        total = total + a[:, start : start + _BLOCK] @ b[start : start + _BLOCK]
    return total


def wide(a: Any, b: Any) -> Any:
    """Summed in fp64 and rounded once to ``a``'s dtype."""
    return (a.double() @ b.double()).to(a.dtype)


def exchanged(a: Any, b: Any) -> Any:
    """Computed as the transpose of b' a'."""
    return (b.t() @ a.t()).t().contiguous()
