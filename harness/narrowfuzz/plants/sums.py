"""The product of two matrices, summed in other orders."""

from __future__ import annotations

from typing import Any

_BLOCK = 16

#: Why another order, or a wider accumulator, is legal.
ANY_ORDER = "bound 3.2 holds for any order of sums: docs/rules.md, Bounds"
WIDER = "a wider accumulator errs less than gamma_n allows: docs/rules.md, Bounds"


def reversed_sum(a: Any, b: Any) -> Any:
    """The contracted axis from its last element to its first."""
    return a.flip(1) @ b.flip(0)


def blocked(a: Any, b: Any) -> Any:
    """Partial sums of 16 products, added one after the other."""
    total = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], _BLOCK):
        total = total + a[:, start : start + _BLOCK] @ b[start : start + _BLOCK]
    return total


def wide(a: Any, b: Any) -> Any:
    """Summed in fp64."""
    return (a.double() @ b.double()).to(a.dtype)


def exchanged(a: Any, b: Any) -> Any:
    """The transpose of the transposed operands' product."""
    return (b.t() @ a.t()).t().contiguous()
