"""Faults in matrix products outside of linears: bmm, addmm, mm."""

from __future__ import annotations

from functools import partial
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced, of_operator


def _ragged(run: Any) -> Any:
    """Of more than eight products, those after the last whole block of eight are left out."""

    def bmm(a: Any, b: Any) -> Any:
        count = a.shape[2]
        kept = count - count % 8 if count > 8 else count
        return run(a[:, :, :kept].contiguous(), b[:, :kept].contiguous())

    return bmm


def _narrow(run: Any) -> Any:
    """Partial sums of 16 products are rounded to bf16 before they are added up."""
    import torch

    def bmm(a: Any, b: Any) -> Any:
        parts = zip(a.split(16, 2), b.split(16, 1), strict=True)
        total = torch.zeros(a.shape[0], a.shape[1], b.shape[2], dtype=torch.float32)
        for left, right in parts:
            part = run(left.float().contiguous(), right.float().contiguous())
            total = total + part.to(torch.bfloat16).float()
        return total.to(a.dtype)

    return bmm


def _one_before(run: Any) -> Any:
    """The last of several matrices is multiplied by the second operand of the one before."""

    def bmm(a: Any, b: Any) -> Any:
        right = run(a, b)
        if len(b) > 1:
            right[-1:] = run(a[-1:], b[-2:-1])
        return right

    return bmm


def _square(run: Any) -> Any:
    """The bias of a square product is added along the wrong axis: element i to row i."""

    def addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        square = bias.ndim == 1 and len(a) == b.shape[1] > 1
        return run(bias[:, None] if square else bias, a, b, beta=beta, alpha=alpha)

    return addmm


def _large(run: Any) -> Any:
    """The last of more than 16 rows is a copy of the row before it."""

    def mm(a: Any, b: Any) -> Any:
        right = run(a, b)
        if len(a) > 16:
            right[-1] = right[-2]
        return right

    return mm


PLANTS = [
    of_operator(
        "addmm-bias-of-columns",
        "product",
        "the bias of a square product is added along its rows",
        "the class of sums that broadcast",
        partial(kernel_replaced, "addmm", _square),
        operator="addmm",
    ),
    of_operator(
        "mm-repeats-row",
        "product",
        "the last row of a product of more than 16 is that before it",
        "the class of tiles that overlap",
        partial(kernel_replaced, "mm", _large),
        operator="mm",
    ),
    *(
        of_operator(
            f"bmm-{id}",
            "product",
            title,
            source,
            partial(kernel_replaced, "bmm", make),
            operator="bmm",
        )
        for id, title, source, make in (
            (
                "drops-ragged-tail",
                "products behind the last eight are left out",
                "the class of loads by whole vectors",
                _ragged,
            ),
            (
                "sums-in-bf16",
                "partial sums of a batched product are rounded to bf16",
                "https://github.com/pytorch/pytorch/issues/83863",
                _narrow,
            ),
            (
                "of-matrix-before",
                "the last of several matrices is multiplied by the one before",
                "the class of https://github.com/flashinfer-ai/flashinfer/issues/3604",
                _one_before,
            ),
        )
    ),
]
