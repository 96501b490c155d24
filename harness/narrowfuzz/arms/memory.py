"""Memory that holds NaN before a library gets it: what it never writes then shows.

A kernel that leaves its output unwritten returns what the allocator's memory happens to hold, which
mostly is the result of the run before, or zeros: two runs agree and a repetition says nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

#: glibc, mallopt(3): from here on fill what is allocated with the complement of this byte. Any
#: number but 0 switches it on, and the byte 0 makes the filling 0xff: NaN in every float format.
M_PERTURB, NAN_BYTES = -6, 0x100
#: Bytes an element of a result may take, and blocks of each size that are filled and given back.
_WIDTHS, _BLOCKS = (1, 2, 4), 8


#: glibc's ``tcache_max``, 1032, and what alignment may add.
_SET_ASIDE = 1032 + 128


@cache
def _mallopt() -> Any:
    """glibc's function; None where there is none."""
    return getattr(ctypes.CDLL(None), "mallopt", None)


def _leave_behind(size: int, device: str) -> None:
    """Blocks of so many bytes, filled and given back."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BLOCKS)]
    for block in blocks:
        block.fill_(255)


@contextmanager
def poisoned(sizes: Iterable[int], device: str = "cpu") -> Iterator[None]:
    """Memory that is allocated inside holds NaN, not what was there before.

    On a CPU with glibc that is all memory but what it had set aside by size, up to ``_SET_ASIDE``
    bytes, which is why blocks of these ``sizes`` (in elements, those of the results) are filled and
    given back first; elsewhere it is those blocks alone.
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
