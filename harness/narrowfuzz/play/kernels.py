"""Selects kernels: oneDNN's or PyTorch's own on a CPU, the number of threads, and none that a model
compiles itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def without_onednn() -> Iterator[None]:
    """PyTorch's own kernels multiply, in backward too: the switch applies to the whole process."""
    # not ``flags``: it also sets the precision of fp32 products, and warns about GPUs
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = before


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """A CPU's kernels use this many threads."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def eagerly() -> AbstractContextManager[None]:
    """Parts that a model compiles itself run uncompiled, so that an eager arm is eager, modes see
    its kernels, and hooks are not traced."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
