"""What passes through the emulated extension, for whoever listens.

Tensors are live: a listener that keeps one must copy it. Nothing is recorded while nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Cast:
    """One call of a quantising kernel; MXFP8 tells of its two directions one by one."""

    #: What was quantised, in its own dtype, any shape; fp32 if a fused kernel never rounded it.
    input: torch.Tensor
    #: uint8 codes in the input's shape.
    codes: torch.Tensor
    #: Multiplicative fp32 scale as applied, one element (delayed and current scaling), or E8M0
    #: bytes (uint8) of MXFP8 without padding: (rows, columns/32) of the row-wise direction,
    #: (rows/32, columns) of the column-wise one.
    scale: torch.Tensor
    #: The cell the kernel stored max|input| in, or None; its address tells which slot.
    amax: torch.Tensor | None
    format: Literal["e4m3", "e5m2"]


@dataclass(frozen=True)
class Operand:
    """One side of a GEMM as the kernel got it."""

    #: uint8 codes, or the tensor itself where it is in high precision: a matrix before the
    #: transposition that the layout's letter asks for, even if the kernel read a transposed copy.
    data: torch.Tensor
    #: fp32 1/scale (one element), E8M0 bytes, or None in high precision.
    scale_inv: torch.Tensor | None
    #: e4m3, e5m2, bf16, fp32 or fp16.
    format: str


@dataclass(frozen=True)
class Multiply:
    """One GEMM: result = op(b) @ op(a), where op transposes for T; plus a bias not told here."""

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
    """Call ``listener`` for everything that passes until left."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def heard() -> bool:
    """True if anybody listens."""
    return bool(_listeners)


def tell(seen: Seen) -> None:
    """To every listener."""
    for listener in _listeners:
        listener(seen)
