"""Faults of grouped matrix products, one product per group of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced, of_operator

#: Rows in a tile of the kernel.
_TILE = 16


def of_groups(change: Callable[..., None], *dims: tuple[int, int]) -> Callable[[Any], Any]:
    """``change(run, result, a, b, ends)`` alters in place the ``result`` of torch's own kernel, for
    operands whose pair of ``ndim`` is one of ``dims``; ``ends`` are the rows where groups end."""

    def make(run: Any) -> Any:
        def grouped_mm(
            a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
        ) -> Any:
            result = run(a, b, offs, bias, out_dtype)
            if offs is not None and (a.ndim, b.ndim) in dims:
                change(run, result, a, b, offs.tolist())
            return result

        return grouped_mm

    return make


def spans(ends: list[int]) -> list[tuple[int, int, int]]:
    """(number, start, end) of each group."""
    return [(i, start, end) for i, (start, end) in enumerate(pairwise([0, *ends]))]


def _full_tile(run: Any, y: Any, a: Any, b: Any, ends: list[int]) -> None:
    """The last row of a group that consists of whole tiles is not written."""
    for _, start, end in spans(ends):
        if end > start and (end - start) % _TILE == 0:
            y[end - 1] = 0.0


def _next_expert(run: Any, y: Any, a: Any, b: Any, ends: list[int]) -> None:
    """A tile that contains the end of one group and the start of the next is multiplied by the
    matrix of the first only."""
    for number, start, end in spans(ends):
        shared = min(-(-end // _TILE) * _TILE, ends[-1])
        if end > start and shared > end:
            y[end:shared] = a[end:shared] @ b[number]


def _unwritten(run: Any, grad: Any, a: Any, b: Any, ends: list[int]) -> None:
    """The gradient of an expert without rows is not written: the memory still holds that of the
    expert before."""
    for number, start, end in spans(ends):
        if start == end and number:
            grad[number] = grad[number - 1]


def _whole_tile(run: Any, grad: Any, a: Any, b: Any, ends: list[int]) -> None:
    """The last group's sum includes the rows after it, up to the end of its tile."""
    start = ends[-2] if len(ends) > 1 else 0
    end = min(-(-ends[-1] // _TILE) * _TILE, a.shape[1])
    grad[-1] = a[:, start:end] @ b[start:end]


def _narrow(run: Any, grad: Any, a: Any, b: Any, ends: list[int]) -> None:
    """Partial sums of 16 rows are rounded to bf16 before they are added up."""
    import torch

    for number, start, end in spans(ends):
        total = torch.zeros(grad.shape[1:], dtype=torch.float32)
        for at in range(start, end, _TILE):
            rows = slice(at, min(at + _TILE, end))
            part = a[:, rows].float() @ b[rows].float()
            total = total + part.to(torch.bfloat16).float()
        grad[number] = total.to(grad.dtype)


def _ragged(run: Any, y: Any, a: Any, b: Any, ends: list[int]) -> None:
    """Products after the last whole block of 32 are left out."""
    whole = a.shape[1] - a.shape[1] % 32
    if whole in (0, a.shape[1]):
        return
    for number, start, end in spans(ends):
        y[start:end] = a[start:end, :whole] @ b[number, :whole]


_ROWS, _SUMS = (2, 3), (2, 2)
PLANTS = [
    of_operator(
        f"grouped-mm-{id}",
        "experts",
        title,
        source,
        partial(kernel_replaced, "_grouped_mm", of_groups(change, dims)),
        operator="grouped_mm",
    )
    for id, title, source, change, dims in (
        (
            "full-tile-loses-row",
            "of a group of whole tiles of 16 rows the last row is not written",
            "the class of https://github.com/deepseek-ai/DeepGEMM/issues/365",
            _full_tile,
            _ROWS,
        ),
        (
            "tile-of-expert-before",
            "a tile of 16 rows that two groups share is multiplied by the matrix of the first",
            "the class of https://github.com/huggingface/kernels-community/issues/1153",
            _next_expert,
            _ROWS,
        ),
        (
            "empty-group-unwritten",
            "the gradient of an expert without rows is what memory held",
            "https://github.com/tgale96/grouped_gemm/issues/36",
            _unwritten,
            _SUMS,
        ),
        (
            "gradient-reads-tail",
            "the weight gradient of the last group sums up rows behind it, to a tile's end",
            "https://github.com/NVIDIA/TransformerEngine/issues/3116",
            _whole_tile,
            _SUMS,
        ),
        (
            "gradient-sums-in-bf16",
            "partial sums of 16 rows of a weight gradient are rounded to bf16",
            "https://github.com/pytorch/pytorch/issues/83863",
            _narrow,
            _SUMS,
        ),
        (
            "drops-ragged-tail",
            "products behind the last 32 of a row are left out",
            "the class of https://github.com/huggingface/kernels-community/issues/1153",
            _ragged,
            _ROWS,
        ),
    )
]
