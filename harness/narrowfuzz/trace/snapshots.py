"""What a run of a library's layers left, event by event: numpy and plain data, so rules need no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.trace.address import At as Address
from narrowfuzz.trace.address import Phase

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, order=True)
class SlotName:
    """One tensor of one layer that has a scale."""

    layer: str
    direction: Direction
    index: int

    def __str__(self) -> str:
        return f"{self.layer} {self.direction} slot {self.index}"

    def at(self, event: int = -1) -> Address:
        """Its state after an event."""
        return Address(
            what="state", event=event, layer=self.layer, name=self.direction, index=(self.index,)
        )


@dataclass(frozen=True)
class At:
    """Where execution stood: which forward's which layer call (-1: outside any), in which phase."""

    phase: Phase
    forward: int = -1
    call: int = -1


class Wrong(NamedTuple):
    """The first code, or scale of a block, that is not the definition's."""

    what: Literal["codes", "scale"]
    #: Where: of a code its row and column, of a scale its block in the order of bytes.
    place: tuple[int, ...]
    got: float
    want: float


@dataclass(frozen=True)
class CastSeen:
    """One tensor quantised."""

    at: At
    #: None where the library keeps no state that would tell.
    slot: SlotName | None
    format: str
    #: Multiplicative scale as applied; None for block scales.
    scale: np.float32 | None
    #: max|x| of what was quantised, NaN left out.
    amax: np.float32
    #: uint8, rows of the tensor as it was quantised.
    codes: NDArray[Any]
    #: None where codes are the saturating cast of x * scale, and block scales their blocks' own.
    wrong: Wrong | None = None
    #: E8M0 bytes, row by row; empty where there is one scale.
    blocks: bytes = b""

    @property
    def inverse(self) -> bytes:
        """What a product must divide by: 1 / scale, or the block scales; empty if not known."""
        if self.scale is None:
            return self.blocks
        with np.errstate(divide="ignore"):
            return np.float32(np.float32(1.0) / self.scale).tobytes()


@dataclass(frozen=True)
class Side:
    """One operand of a product."""

    format: str
    #: uint8 codes; None in high precision.
    codes: NDArray[Any] | None = None
    #: 1 / scale, one element; None in high precision and for block scales.
    scale_inv: np.float32 | None = None
    #: E8M0 bytes, row by row; empty where there is one scale.
    blocks: bytes = b""

    @property
    def inverse(self) -> bytes:
        """What the product divides by, in one form for all scalings; empty in high precision."""
        return self.blocks if self.scale_inv is None else self.scale_inv.tobytes()


@dataclass(frozen=True)
class ProductSeen:
    """One GEMM."""

    at: At
    role: Literal["output", "grad_input", "grad_weight", "gradient"]
    a: Side
    b: Side


@dataclass(frozen=True)
class CallSeen:
    """One call of one layer."""

    at: At
    layer: str


@dataclass(frozen=True)
class Moment:
    """One event, and how things stood after it."""

    event: int
    calls: tuple[CallSeen, ...]
    casts: tuple[CastSeen, ...]
    products: tuple[ProductSeen, ...]
    state: Mapping[SlotName, Slot]
    #: What the library has set aside for later, by name of the place.
    pending: Mapping[str, int]
