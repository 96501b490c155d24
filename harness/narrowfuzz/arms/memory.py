"""Memory that holds NaN before a library gets it: what it never writes then shows.

A kernel that leaves its output unwritten returns what the allocator's memory happens to hold, which
mostly is the result of the run before, or zeros: two runs agree and a repetition says nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

#: glibc, mallopt(3): from here on fill what is allocated with the complement of this byte. Any
#: number but 0 switches it on, and the byte 0 makes the filling 0xff: NaN in every float format.
M_PERTURB, NAN_BYTES = -6, 0x100
#: Bytes an element of a result may take, and blocks of each size that are filled and given back.
_WIDTHS, _BLOCKS = (1, 2, 4), 8


@contextmanager
def poisoned(sizes: Iterable[int], device: str = "cpu") -> Iterator[None]:
    """Memory that is allocated inside holds NaN, not what was there before.

    On a CPU with glibc that is all memory but what it had set aside by size, which is why blocks of
    these ``sizes`` (in elements, those of the results) are filled and given back first; elsewhere
    it is those blocks alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device == "cpu" else None
    if mallopt is not None:
        mallopt(M_PERTURB, NAN_BYTES)
    try:
        for size in {width * size for size in sizes for width in _WIDTHS}:
            blocks = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BLOCKS)]
            for block in blocks:
                block.fill_(255)
        yield
    finally:
        if mallopt is not None:
            mallopt(M_PERTURB, 0)
