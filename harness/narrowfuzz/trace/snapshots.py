"""The record of a run of a library's layers, event by event: numpy arrays and plain data, so that
rules need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.chance import Way
from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.trace.address import At, Phase

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, order=True)
class SlotName:
    """The name of a slot: the place in a layer's scaling state for one tensor that is cast."""

    layer: str
    direction: Direction
    index: int

    def __str__(self) -> str:
        return f"{self.layer} {self.direction} slot {self.index}"

    def at(self, event: int = -1) -> At:
        """The address of this slot's state after an event."""
        return At(
            what="state", event=event, layer=self.layer, name=self.direction, index=(self.index,)
        )


@dataclass(frozen=True)
class ExecutionPoint:
    """A point of execution: the phase, the number of the forward, and the number of the layer call
    in that forward (-1: outside any)."""

    phase: Phase
    forward: int = -1
    call: int = -1


class Wrong(NamedTuple):
    """The first code or block scale of a cast that differs from the format's definition."""

    what: Literal["codes", "scale"]
    #: Row and column of a code; the index of a block scale in the stored array of scales.
    place: tuple[int, ...]
    got: float
    want: float
    #: What the code may be as well, where the cast rounds stochastically.
    other: float | None = None


class OneWay(NamedTuple):
    """All elements of a cast that should be rounded at random were rounded by a rule."""

    way: Way
    #: The number of elements that are no values of the format.
    rounded: int


@dataclass(frozen=True)
class CastSeen:
    """One cast: a tensor that was quantised."""

    at: ExecutionPoint
    #: None where the library keeps no state from which the slot is known.
    slot: SlotName | None
    format: str
    #: The scale by which the tensor was multiplied; None for block scales.
    scale: np.float32 | None
    #: max|x| of the tensor, NaN ignored.
    amax: np.float32
    #: uint8, rows of the tensor as it was quantised.
    codes: NDArray[Any]
    #: None where the codes are a saturating cast of x * scale and block scales are right.
    wrong: Wrong | OneWay | None = None
    #: The scales of blocks by which a product dequantises, E8M0 bytes, 1 / scale in float32, or of
    #: NVFP4 int64 of both levels, row by row; empty where there is a single scale.
    blocks: bytes = b""

    @property
    def inverse(self) -> bytes:
        """The scales that a product needs to dequantise the codes: 1 / scale in float32, or the
        bytes of the block scales."""
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
    #: 1 / scale; None in high precision and for block scales.
    scale_inv: np.float32 | None = None
    #: The scales of blocks, as in ``CastSeen``, and how many there are along each dimension of the
    #: codes; empty where there is a single scale.
    blocks: bytes = b""
    scales: tuple[int, ...] = ()

    @property
    def inverse(self) -> bytes:
        """The scales with which the product dequantises, as bytes for every kind of scaling; empty
        in high precision."""
        return self.blocks if self.scale_inv is None else self.scale_inv.tobytes()


@dataclass(frozen=True)
class ProductSeen:
    """One GEMM."""

    at: ExecutionPoint
    role: Literal["output", "grad_input", "grad_weight", "gradient"]
    a: Side
    b: Side


@dataclass(frozen=True)
class CallSeen:
    """One call of one layer."""

    at: ExecutionPoint
    layer: str


@dataclass(frozen=True)
class Moment:
    """One event: what happened in it, and the scaling state after it."""

    event: int
    calls: tuple[CallSeen, ...]
    casts: tuple[CastSeen, ...]
    products: tuple[ProductSeen, ...]
    state: Mapping[SlotName, Slot]
    #: How many things the library has set aside for later, by the name of the place.
    pending: Mapping[str, int]
