"""Functions that falsify an observed array: each returns a changed copy, none works in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowfuzz.numerics.formats import F32, Codes, Format, decode
from narrowfuzz.trace.trace import Seen

#: An error of 1 % is more than half a step of bf16, and less than any bound of 8-bit numbers.
GAIN = np.float32(1.01)


@dataclass(frozen=True)
class Numbers:
    """A falsification of plain numbers."""

    name: str
    change: Callable[[F32], F32]


@dataclass(frozen=True)
class Operands:
    """A falsification of an operand; ``change`` returns None if there is nothing to falsify."""

    name: str
    change: Callable[[Seen, Format | None], Seen | None]


def zeros(x: F32) -> F32:
    return np.zeros_like(x)


def gain(x: F32) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x * GAIN, dtype=x.dtype)


def sign_flip(x: F32) -> F32:
    return np.asarray(-x, dtype=x.dtype)


def swapped_rows(x: F32) -> F32:
    """Move every row one place further; the elements of a vector count as its rows."""
    return np.roll(x, 1, axis=0 if x.ndim else None)


def lost(x: F32) -> F32:
    """1 where NaN was, NaN everywhere else."""
    return np.where(np.isnan(x), np.float32(1.0), np.float32(np.nan)).astype(x.dtype)


def infinite(x: F32) -> F32:
    return np.full_like(x, np.inf)


NUMBERS = (
    Numbers("zeros", zeros),
    Numbers("gain 1.01", gain),
    Numbers("sign flip", sign_flip),
    Numbers("swapped rows", swapped_rows),
)
LOST, INFINITE = Numbers("NaN for numbers", lost), Numbers("Inf", infinite)


def one_code_up(codes: Codes, fmt: Format) -> Codes:
    """Replace every second code, in a checkerboard pattern, with the code of the next larger value;
    the largest with that of the next smaller one. NaN and Inf stay."""
    every = np.arange(1 << fmt.bits, dtype=fmt.code_dtype)
    values = decode(every, fmt)
    finite = every[np.isfinite(values)]
    ladder = finite[np.argsort(values[finite], kind="stable")]
    ladder = ladder[decode(ladder, fmt) != 0]  # from -0 to +0 would be no step
    up = every.copy()
    up[ladder[:-1]] = ladder[1:]
    up[ladder[-1]] = ladder[-2]
    up[values == 0] = ladder[len(ladder) // 2]
    even = (np.indices(codes.shape).sum(axis=0) % 2) == 0
    return np.where(even, up[codes], codes).astype(codes.dtype)


def _codes(change: Callable[[Codes, Format], Codes], values: Callable[[F32], F32]) -> Any:
    """A falsification that changes an operand's codes with ``change``, or its dequantised values
    with ``values`` if its codes were not observed."""

    def changed(seen: Seen, fmt: Format | None) -> Seen | None:
        if seen.codes is not None and fmt is not None:
            return replace(seen, codes=change(seen.codes, fmt))
        if seen.codes is None and seen.values is not None:
            return replace(seen, values=values(seen.values))
        return None

    return changed


def _sign(codes: Codes, fmt: Format) -> Codes:
    return codes ^ codes.dtype.type(1 << (fmt.bits - 1))


def stale_scale(scale: NDArray[Any]) -> NDArray[Any]:
    """Twice the scale, as if it dated from before the tensor grew by a factor of two. Where that is
    not a valid scale: 1, as if it dated from before the tensor had an Inf or a NaN."""
    if scale.dtype.names:
        block = scale["block"]
        other = scale.copy()
        other["block"] = np.where(block < 0x7E, block + 1, block - 1)
        return other
    if scale.dtype == np.uint8:
        return np.where(scale < 254, scale + 1, scale - 1).astype(np.uint8)
    with np.errstate(over="ignore"):
        twice = scale * np.float32(2.0)
    usual = np.isfinite(twice) & (twice > 0)
    return np.where(usual, twice, np.float32(1.0)).astype(scale.dtype)


def _stale(seen: Seen, fmt: Format | None) -> Seen | None:
    return None if seen.scale is None else replace(seen, scale=stale_scale(seen.scale))


def _other_scales(seen: Seen, fmt: Format | None) -> Seen | None:
    if seen.scale is None or seen.scale.ndim == 0:
        return None  # a single scale has no other to be swapped with
    return replace(seen, scale=np.roll(seen.scale, 1, axis=0))


CODES = (
    Operands("zeros", _codes(lambda codes, fmt: np.zeros_like(codes), zeros)),
    Operands("one code up", _codes(one_code_up, gain)),
    Operands("sign flip", _codes(_sign, sign_flip)),
    Operands("swapped rows", _codes(lambda codes, fmt: np.roll(codes, 1, axis=0), swapped_rows)),
)
SCALES = (
    Operands("stale scale", _stale),
    Operands("swapped scales", _other_scales),
)


def _amax(number: Numbers) -> Operands:
    def changed(seen: Seen, fmt: Format | None) -> Seen | None:
        return None if seen.amax is None else replace(seen, amax=number.change(seen.amax))

    return Operands(number.name, changed)


AMAX = tuple(_amax(number) for number in NUMBERS if number.change is not sign_flip)
