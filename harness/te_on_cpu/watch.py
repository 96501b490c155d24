"""Events of the emulated extension (casts, GEMMs, scale updates), passed to listeners.

Tensors are live: a listener that stores one must copy it. Without a listener nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Cast:
    """One call of a quantising kernel; block scaling reports its two directions separately."""

    #: The quantised data in its own dtype, any shape; fp32 if a fused kernel never rounded it. What
    #: a kernel transforms before it quantises is not transformed yet.
    input: torch.Tensor
    #: uint8 codes in the input's shape; of FP4 one in a byte.
    codes: torch.Tensor
    #: Multiplicative fp32 scale as applied, one element (delayed and current scaling); or without
    #: padding, as the blocks lie in the matrix, E8M0 bytes (uint8) of MXFP8 or multiplicative fp32
    #: scales of FP8 block scaling: two dimensions, such as (rows, columns/32) of the row-wise
    #: direction, (rows/32, columns) of the column-wise one. Of NVFP4, one for each block of 16 or
    #: 16 x 16: int64 of the bits of the tensor's amax and, in the lowest byte, an E4M3 scale.
    scale: torch.Tensor
    #: The cell in which the kernel stored max|input|, or None; its address identifies the slot.
    amax: torch.Tensor | None
    format: Literal["e4m3", "e5m2", "e2m1"]


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM as the kernel got it."""

    #: uint8 codes, or the tensor itself if it is in high precision: the matrix before the
    #: transposition that the layout's letter denotes, even if the kernel read a transposed copy.
    data: torch.Tensor
    #: fp32 1/scale (one element; of FP8 block scaling, one for each block), E8M0 bytes, both levels
    #: of NVFP4 as in ``Cast``, or None: in high precision, and for operands with blocks of the real
    #: extension (``v2_native``).
    scale_inv: torch.Tensor | None
    #: e4m3, e5m2, e2m1, bf16, fp32 or fp16.
    format: str


@dataclass(frozen=True)
class Multiply:
    """One GEMM: result = op(b) @ op(a), where op transposes for T, plus a bias, not recorded."""

    #: TN: output, NN: grad_input, NT: grad_weight (cuBLAS letters, as TransformerEngine calls it).
    layout: Literal["TN", "NN", "NT"]
    a: Operand
    b: Operand
    result: torch.Tensor


@dataclass(frozen=True)
class Update:
    """One call of the bulk amax and scale update; its tables are updated in place afterwards."""

    histories: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]


Seen = Cast | Multiply | Update
_listeners: list[Callable[[Seen], None]] = []


@contextmanager
def listening(listener: Callable[[Seen], None]) -> Iterator[None]:
    """A context in which ``listener`` is called with every event."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def has_listeners() -> bool:
    """True if there is a listener."""
    return bool(_listeners)


def notify(seen: Seen) -> None:
    """Call every listener."""
    for listener in _listeners:
        listener(seen)
