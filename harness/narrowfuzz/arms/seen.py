"""Live casts and products -> what a trace keeps of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowfuzz.numerics.formats import E4M3FN, E5M2, canonical, encode
from narrowfuzz.numerics.scales import mx_factor, mx_scale_by_reciprocal
from narrowfuzz.schedule.trace import At, CastSeen, ProductSeen, Side
from narrowfuzz.stateful import RawCast, RawProduct, RawSide

_FLOAT8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
_BLOCKED = {"e4m3": E4M3FN, "e5m2": E5M2}
#: Code of each NaN, without its sign: hardware writes all NaNs alike, torch keeps the sign.
_NAN = {"e4m3": (0x7F,), "e5m2": (0x7D, 0x7E, 0x7F)}


def see_cast(raw: RawCast, at: At) -> CastSeen:
    """A copy of one cast, checked against the definition while its input still exists."""
    x = raw.input.detach().float()
    single = raw.scale.dtype == torch.float32
    amax = torch.nan_to_num(x.abs(), nan=0.0, posinf=float("inf")).amax() if x.numel() else 0.0
    exact = _exact(x, raw.scale, raw) if single else not x.numel() or _same_blocks(x, raw)
    return CastSeen(
        at=at,
        slot=raw.slot,
        format=raw.format,
        scale=np.float32(raw.scale.item()) if single else None,
        amax=np.float32(float(amax)),
        codes=_codes(raw.codes),
        exact=exact,
        blocks=b"" if single else raw.scale.contiguous().numpy().tobytes(),
    )


def _exact(x: torch.Tensor, scale: torch.Tensor, raw: RawCast) -> bool:
    dtype, largest = _FLOAT8[raw.format]
    want = (x * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    return _same_codes(want, raw.codes.view(torch.uint8).reshape(want.shape), raw.format)


def _same_codes(want: torch.Tensor, got: torch.Tensor, fmt: str) -> bool:
    """Alike bit for bit, where all NaNs count as one."""
    nan = torch.tensor(_NAN[fmt], dtype=torch.uint8)
    both = torch.isin(want & 0x7F, nan) & torch.isin(got & 0x7F, nan)
    return bool(((want == got) | both).all())


def _same_blocks(x: torch.Tensor, raw: RawCast) -> bool:
    """MXFP8: are bytes and codes of each block of 32, along rows or columns, those of the rule?"""
    fmt, block = _BLOCKED[raw.format], 32
    matrix = np.asarray(x.reshape(-1, x.shape[-1]).numpy())
    codes, scale = _codes(raw.codes), raw.scale.numpy()
    if scale.shape == (matrix.shape[0] // block, matrix.shape[1]):
        matrix, codes, scale = matrix.T, codes.T, scale.T
    rows, columns = matrix.shape
    magnitude = np.nan_to_num(np.abs(matrix), nan=0.0, posinf=np.inf)
    amax = magnitude.reshape(rows, columns // block, block).max(axis=2)
    if not np.array_equal(scale, mx_scale_by_reciprocal(amax, fmt)):
        return False
    with np.errstate(invalid="ignore"):
        scaled = matrix.astype(np.float64) / np.repeat(mx_factor(scale), block, axis=1)
    return np.array_equal(canonical(encode(scaled, fmt), fmt), canonical(codes, fmt))


def see_product(raw: RawProduct, at: At) -> ProductSeen:
    """A copy of one product's operands."""
    return ProductSeen(at, raw.role, _side(raw.a), _side(raw.b))


def _side(raw: RawSide) -> Side:
    if raw.scale_inv is None:
        return Side(raw.format)
    single = raw.scale_inv.dtype == torch.float32 and raw.scale_inv.numel() == 1
    return Side(
        raw.format,
        _codes(raw.data),
        np.float32(raw.scale_inv.item()) if single else None,
        raw.scale_inv.contiguous().numpy().tobytes() if raw.scale_inv.dtype == torch.uint8 else b"",
    )


def _codes(codes: torch.Tensor) -> NDArray[Any]:
    flat = codes.detach().view(torch.uint8)
    return np.array(flat.reshape(-1, flat.shape[-1]).numpy())
