"""Live casts and products -> what a trace keeps of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.numerics.formats import E4M3FN, E5M2, F32
from harness.numerics.scales import mx_scale
from harness.schedule.trace import At, CastSeen, ProductSeen, Side
from harness.stateful import RawCast, RawProduct, RawSide

_FLOAT8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
_BLOCK = 32
#: Code of each NaN, without its sign: hardware writes all NaNs alike, torch keeps the sign.
_NAN = {"e4m3": (0x7F,), "e5m2": (0x7D, 0x7E, 0x7F)}


def see_cast(raw: RawCast, at: At) -> CastSeen:
    """A copy of one cast, checked against the definition while its input still exists."""
    x = raw.input.detach().float()
    single = raw.scale.dtype == torch.float32
    amax = torch.nan_to_num(x.abs(), nan=0.0, posinf=float("inf")).amax() if x.numel() else 0.0
    if single:
        exact = _exact(x, raw.scale, raw)
    else:
        x = x.reshape(-1, x.shape[-1]) if x.numel() else x
        exact = not x.numel() or _exact_blocks(x, raw)
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


#: Kernels multiply by a reciprocal that is rounded: a maximum so close to where the scale changes
#: may fall on either side.
_NEAR = 2.0**-22


def _exact_blocks(x: torch.Tensor, raw: RawCast) -> bool:
    """MXFP8, along rows or columns: scales of the blocks' maxima, rounded up, and codes by them."""
    rows, columns = x.shape
    axis = 1 if raw.scale.shape == (rows, columns // _BLOCK) else 0
    line = x.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    line = line if axis else line.t()
    blocks = line.reshape(len(line), -1, _BLOCK).amax(2).numpy()
    scales = (raw.scale if axis else raw.scale.t()).contiguous().numpy()
    low, high = (_bytes(blocks, near, raw.format) for near in (1 - _NEAR, 1 + _NEAR))
    if scales.shape != blocks.shape or ((scales < low) | (scales > high)).any():
        return False
    factor = torch.from_numpy(np.exp2(127.0 - scales).astype(np.float32))
    factor = factor.repeat_interleave(_BLOCK, 1)
    return _exact(x, factor if axis else factor.t(), raw)


def _bytes(amax: F32, near: float, form: str) -> NDArray[np.uint8]:
    fmt = E4M3FN if form == "e4m3" else E5M2
    return mx_scale((amax * np.float32(near)).astype(np.float32), fmt, "rceil", inf_byte=254)


def _same_codes(want: torch.Tensor, got: torch.Tensor, fmt: str) -> bool:
    """Alike bit for bit, where all NaNs count as one."""
    nan = torch.tensor(_NAN[fmt], dtype=torch.uint8)
    both = torch.isin(want & 0x7F, nan) & torch.isin(got & 0x7F, nan)
    return bool(((want == got) | both).all())


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
