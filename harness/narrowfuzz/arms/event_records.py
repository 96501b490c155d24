"""Converts live casts and products into the records of a trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowfuzz.arms.tensors import host
from narrowfuzz.numerics.chance import one_way
from narrowfuzz.numerics.formats import (
    E2M1,
    E4M3FN,
    E5M2,
    F32,
    CastRounding,
    decode,
    encode,
    neighbours,
)
from narrowfuzz.numerics.hadamard import TE_SIGNS, transform
from narrowfuzz.numerics.scales import (
    FP4_BLOCK,
    FP8_BLOCK,
    current_scale,
    mx_factor,
    mx_scale_by_reciprocal,
    pow2_floor,
)
from narrowfuzz.numerics.two_level import TWO_LEVEL, multiplier, two_level_scale, unit
from narrowfuzz.play import library as play
from narrowfuzz.trace.snapshots import (
    CastSeen,
    ExecutionPoint,
    OneWay,
    ProductSeen,
    Side,
    SlotName,
    Wrong,
)

_FLOAT8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
_BLOCKED = {"e4m3": E4M3FN, "e5m2": E5M2, "e2m1": E2M1}
#: Code of each NaN, without its sign: hardware writes all NaNs alike, torch keeps the sign.
_NAN = {"e4m3": (0x7F,), "e5m2": (0x7D, 0x7E, 0x7F), "e2m1": ()}
#: What hardware makes of NaN, of which E2M1 has none.
_FP4_OF_NAN = np.float32(E2M1.max)


def see_cast(
    raw: play.Cast, at: ExecutionPoint, gradient_rounding: CastRounding = "nearest"
) -> CastSeen:
    """A copy of one cast, checked against the definition while its input still exists. What a
    backward casts is a gradient; what it recomputes has a phase of its own."""
    x = raw.input.detach().float()
    single = raw.scale.dim() < 2
    amax = torch.nan_to_num(x.abs(), nan=0.0, posinf=float("inf")).amax() if x.numel() else 0.0
    wrong: _Definition = _wrong_codes if single else _WRONG_BLOCKS[raw.scale.dtype]
    if gradient_rounding == "stochastic" and at.phase == "backward":
        wrong = _WRONG_BY_CHANCE
    return CastSeen(
        at=at,
        slot=None if raw.slot is None else SlotName(*raw.slot),
        format=raw.format,
        scale=np.float32(raw.scale.item()) if single else None,
        amax=np.float32(float(amax)),
        codes=_codes(raw.codes),
        wrong=wrong(x.reshape(-1, x.shape[-1]), raw) if x.numel() else None,
        blocks=b"" if single else _inverse(raw.scale),
    )


def _inverse(scales: torch.Tensor) -> bytes:
    """The scales of blocks by which a product dequantises what these scales quantised."""
    return host(1 / scales if scales.dtype.is_floating_point else scales).tobytes()


def _wrong_codes(x: torch.Tensor, raw: play.Cast) -> Wrong | None:
    """The first code that differs from the saturating cast of tensor times scale."""
    dtype, largest = _FLOAT8[raw.format]
    want = (x * raw.scale).clamp(-largest, largest).to(dtype)
    got = raw.codes.view(dtype).reshape(want.shape)
    return _first(host(got.view(torch.uint8)), host(want.view(torch.uint8)), raw.format)


def _wrong_mx_blocks(x: torch.Tensor, raw: play.Cast) -> Wrong | None:
    """The first scale byte, or else the first code, that differs from the MX definition for blocks
    of 32, which may lie along rows or along columns."""
    fmt, block = _BLOCKED[raw.format], 32
    matrix, codes, scale = host(x), _codes(raw.codes), host(raw.scale)
    across = scale.shape == (matrix.shape[0] // block, matrix.shape[1])
    if across:
        matrix, codes, scale = matrix.T, codes.T, scale.T
    rows, columns = matrix.shape
    magnitude = np.nan_to_num(np.abs(matrix), nan=0.0, posinf=np.inf)
    amax = magnitude.reshape(rows, columns // block, block).max(axis=2)
    right = mx_scale_by_reciprocal(amax, fmt)
    if not np.array_equal(scale, right):
        i, j = map(int, np.argwhere(scale != right)[0])
        index = (j, i) if across else (i, j)
        return Wrong("scale", index, float(scale[i, j]), float(right[i, j]))
    with np.errstate(invalid="ignore"):
        scaled = matrix.astype(np.float64) / np.repeat(mx_factor(scale), block, axis=1)
    want = encode(scaled, fmt)
    return _first(codes.T, want.T, raw.format) if across else _first(codes, want, raw.format)


def _wrong_fp8_blocks(x: torch.Tensor, raw: play.Cast) -> Wrong | None:
    """The first scale, or else the first code, that differs from the definition of FP8 block
    scaling: the scale of a block of 1 x 128, 128 x 1 or 128 x 128, the last of which may be
    incomplete, is the largest power of two that is at most the format's maximum over the block's,
    and 1 for a block of zeros or one with Inf."""
    matrix, codes, scale = host(x), _codes(raw.codes), host(raw.scale)
    amax, (high, wide) = _largest_of_blocks(matrix, scale.shape, FP8_BLOCK)
    rows, columns = matrix.shape
    right = pow2_floor(current_scale(amax, _FLOAT8[raw.format][1]))
    if not np.array_equal(scale, right):
        i, j = map(int, np.argwhere(scale != right)[0])
        return Wrong("scale", (i, j), float(scale[i, j]), float(right[i, j]))
    with np.errstate(invalid="ignore"):
        spread = np.repeat(np.repeat(scale, high, axis=0), wide, axis=1)[:rows, :columns]
        want = encode(matrix.astype(np.float64) * spread, _BLOCKED[raw.format])
    return _first(codes, want, raw.format)


def _largest_of_blocks(
    matrix: NDArray[Any], counts: tuple[int, ...], size: int
) -> tuple[NDArray[Any], tuple[int, int]]:
    """The largest magnitude of each block, of which there are so many along each dimension, and
    their rows and columns, 1 or ``size``. The last ones may be incomplete."""
    high, wide = (1 if n == all_ else size for n, all_ in zip(counts, matrix.shape, strict=True))
    rows, columns = matrix.shape
    magnitude = np.nan_to_num(np.abs(matrix), nan=0.0, posinf=np.inf)
    padded = np.pad(magnitude, ((0, -rows % high), (0, -columns % wide)))
    return padded.reshape(counts[0], high, counts[1], wide).max(axis=(1, 3)), (high, wide)


def _wrong_fp4_blocks(
    x: torch.Tensor,
    raw: play.Cast,
    wrong_codes: Callable[[NDArray[Any], F32], Wrong | OneWay | None],
) -> Wrong | OneWay | None:
    """The first scale, or else what is wrong with the codes, by NVFP4's definition for blocks of
    1 x 16, 16 x 1 or 16 x 16; as scales, what a code of 1 represents is compared. What blocks of
    16 x 1 quantise is Hadamard-transformed first, column by column."""
    matrix, codes, both = host(x), _codes(raw.codes), host(raw.scale)
    if both.shape[1] == matrix.shape[1]:
        matrix = transform(matrix.T, TE_SIGNS).T
    scale = np.empty(both.shape, dtype=TWO_LEVEL)
    scale["block"], scale["amax"] = both & 0xFF, (both >> 8).astype(np.uint32).view(np.float32)
    amax, (high, wide) = _largest_of_blocks(matrix, both.shape, FP4_BLOCK)
    right = two_level_scale(amax, "folded", eps=0.0)
    other = (scale["block"] != right["block"]) | (scale["amax"] != right["amax"])
    if other.any():
        i, j = map(int, np.argwhere(other)[0])
        return Wrong("scale", (i, j), *(float(unit(s[i : i + 1, j])[0]) for s in (scale, right)))
    spread = np.repeat(np.repeat(multiplier(scale, "folded"), high, axis=0), wide, axis=1)
    with np.errstate(all="ignore"):
        scaled = (matrix * spread).astype(np.float32)
    return wrong_codes(codes, np.where(np.isnan(scaled), _FP4_OF_NAN, scaled))


def _not_nearest(codes: NDArray[Any], scaled: F32) -> Wrong | None:
    """The first code that is not the nearest."""
    return _first(codes, encode(scaled, E2M1), "e2m1")


def _not_by_chance(codes: NDArray[Any], scaled: F32) -> Wrong | OneWay | None:
    """The first code that is neither neighbour, or else the rule by which all are rounded."""
    low, high = (encode(side, E2M1) for side in neighbours(scaled, E2M1))
    bad = np.argwhere((codes != low) & (codes != high))
    if not len(bad):
        way = one_way(scaled, decode(codes, E2M1), E2M1)
        return None if way is None else OneWay(way, int((low != high).sum()))
    i, j = map(int, bad[0])
    got, *either = (float(decode(some[[i], [j]], E2M1)[0]) for some in (codes, low, high))
    return Wrong("codes", (i, j), got, *either)


_Definition = Callable[[torch.Tensor, play.Cast], Wrong | OneWay | None]
#: The type of the scales of a cast by blocks -> its definition.
_WRONG_BLOCKS: dict[torch.dtype, _Definition] = {
    torch.uint8: _wrong_mx_blocks,
    torch.float32: _wrong_fp8_blocks,
    torch.int64: partial(_wrong_fp4_blocks, wrong_codes=_not_nearest),
}
_WRONG_BY_CHANCE = partial(_wrong_fp4_blocks, wrong_codes=_not_by_chance)


def _first(got: NDArray[Any], want: NDArray[Any], form: str) -> Wrong | None:
    """The first code that differs; all NaNs are equal."""
    nan = np.isin(got & 0x7F, _NAN[form]) & np.isin(want & 0x7F, _NAN[form])
    bad = np.argwhere((got != want) & ~nan)
    if not len(bad):
        return None
    index = tuple(map(int, bad[0]))
    values = (decode(codes[[index[0]], [index[1]]], _BLOCKED[form])[0] for codes in (got, want))
    return Wrong("codes", index, *map(float, values))


def see_product(raw: play.Product, at: ExecutionPoint) -> ProductSeen:
    """A copy of one product's operands."""
    return ProductSeen(at, raw.role, _side(raw.a), _side(raw.b))


def _side(raw: play.Side) -> Side:
    if raw.inverse is None:
        return Side(raw.format)
    single = raw.inverse.dim() < 2
    return Side(
        raw.format,
        _codes(raw.codes),
        np.float32(raw.inverse.item()) if single else None,
        b"" if single else host(raw.inverse).tobytes(),
        () if single else tuple(raw.inverse.shape),
    )


def _codes(codes: torch.Tensor) -> NDArray[Any]:
    flat = codes.detach().view(torch.uint8)
    return np.array(host(flat.reshape(-1, flat.shape[-1])))
