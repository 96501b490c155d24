"""Fills free memory with NaN before a library allocates it, so that elements it never writes show.

A kernel that does not write its output returns what the allocator's memory happens to hold. That is
mostly the result of the run before, or zeros: two runs agree, and a repetition detects nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

#: glibc, mallopt(3): fill allocated memory with the complement of the value's lowest byte. Any
#: value but 0 switches it on, and a lowest byte of 0 fills with 0xff: NaN in every float format.
M_PERTURB, NAN_BYTES = -6, 0x100
#: Bytes an element of a result may take, and how many blocks of each size are filled and freed.
_WIDTHS, _BLOCKS = (1, 2, 4), 8


#: glibc's ``tcache_max``, 1032 bytes, and what alignment may add.
_SET_ASIDE = 1032 + 128


@cache
def _mallopt() -> Any:
    """glibc's mallopt; None where the C library has none."""
    return getattr(ctypes.CDLL(None), "mallopt", None)


def _leave_behind(size: int, device: str) -> None:
    """Allocate blocks of ``size`` bytes, fill them with 0xff and free them."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BLOCKS)]
    for block in blocks:
        block.fill_(255)


@contextmanager
def poisoned(sizes: Iterable[int], device: str = "cpu") -> Iterator[None]:
    """Memory that is allocated inside holds NaN instead of its previous content.

    On a CPU with glibc, that is all memory except blocks of up to ``_SET_ASIDE`` bytes in its
    cache (tcache). Therefore blocks of these ``sizes`` (the results', in elements) are filled and
    freed first. Elsewhere, only those blocks hold NaN.
    """
    mallopt = _mallopt() if device == "cpu" else None
    if mallopt is not None:
        mallopt(M_PERTURB, NAN_BYTES)
    try:
        for size in {width * size for size in sizes for width in _WIDTHS}:
            if mallopt is None or size <= _SET_ASIDE:
                _leave_behind(size, device)
        yield
    finally:
        if mallopt is not None:
            mallopt(M_PERTURB, 0)
