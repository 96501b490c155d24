"""Operators of torch that are wrong inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowfuzz.plants.plant import Plant


@contextmanager
def _sum(change: Any) -> Iterator[None]:
    """``change(run, x, dims, keepdim)`` is the CPU's sum over dimensions; ``run`` is torch's own.

    It is put under the dispatcher, so that eager, autograd and whoever watches operators call it.
    Reference runs are in float64.
    """
    import torch

    kernel = torch.library.get_kernel("aten::sum.dim_IntList", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
        return kernel.call_boxed(keys, x, dims, keepdim, dtype=dtype)

    def total(x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
        if x.dtype in (torch.float32, torch.bfloat16, torch.float16) and dims:
            return change(run, x, dims, keepdim, dtype)
        return run(x, dims, keepdim, dtype=dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("sum.dim_IntList", total, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _narrow(run: Any, x: Any, dims: Any, keepdim: bool, dtype: Any) -> Any:
    """Halves are added, again and again, and each of these sums is rounded to bf16."""
    import torch

    dim = dims[0] % x.ndim
    part = x.to(torch.bfloat16).movedim(dim, 0)
    while len(part) > 1:
        half = len(part) // 2
        part = torch.cat([part[:half] + part[half : 2 * half], part[2 * half :]])
    return run(part.movedim(0, dim).to(x.dtype), dims, keepdim, dtype=dtype)


def _last_row(run: Any, x: Any, dims: Any, keepdim: bool, dtype: Any) -> Any:
    """Of more rows than 16 the last that no block is full of is left out."""
    dim = dims[0] % x.ndim
    rows = x.shape[dim]
    kept = rows - 1 if rows > 16 and rows % 16 else rows
    return run(x.narrow(dim, 0, kept), dims, keepdim, dtype=dtype)


PLANTS = [
    Plant(
        "sum-in-narrow-dtype",
        "operators",
        "sums over rows are kept in bf16",
        "https://github.com/karpathy/llm.c/issues/428",
        ("torch.*", "torchao.*"),
        lambda: _sum(_narrow),
        needs="a model",
    ),
    Plant(
        "sum-drops-last-row",
        "operators",
        "a sum over rows leaves out the last one",
        "https://github.com/tenstorrent/tt-metal/issues/17551",
        ("torch.*", "torchao.*"),
        lambda: _sum(_last_row),
        needs="a model",
    ),
]
