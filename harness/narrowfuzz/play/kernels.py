"""Whose kernels multiply on a CPU: oneDNN's, or PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_onednn() -> Iterator[None]:
    """PyTorch's own kernels multiply, in backward too: the switch is one of the process."""
    # not ``flags``: that sets what fp32 is computed in as well, and warns of GPUs
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = before
