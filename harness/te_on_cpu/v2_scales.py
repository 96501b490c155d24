"""Scales of current and block scaling, as the 2.x kernels compute them."""

from __future__ import annotations

import torch
from torch import Tensor

from te_on_cpu.kernels import LARGEST, Format
from te_on_cpu.v2_releases import (
    RECIPROCALS_ARE_BITS,
    RECIPROCALS_OF_ALL_MX_SCALES,
    installed_release,
)

MX_BLOCK, FP8_BLOCK = 32, 128
_FLOAT_MAX = torch.finfo(torch.float32).max
#: The bits of 2^-127 in fp32, the only one of these powers of two that is subnormal.
_SMALLEST = 0x400000
_NAN = 0x7FFFFFFF


def largest(values: Tensor) -> Tensor:
    """max|values| as one fp32 element; NaN elements are ignored, an empty tensor gives zero.

    Real contract: kernels reduce with ``fmaxf``, which returns the operand that is not NaN.
    """
    if values.numel() == 0:
        return torch.zeros(1)
    return magnitude(values).amax().reshape(1)


def current_scale(
    amax: Tensor,
    fmt: Format,
    *,
    power_of_two: bool,
    epsilon: float,
    overflow: float = _FLOAT_MAX,
) -> Tensor:
    """Scale for data whose largest magnitude is ``amax``; fp32, shape of ``amax``.

    Real contract (``compute_scale_from_amax`` in ``common/recipe/recipe_common.cuh``): amax is
    raised to epsilon; 0, inf and NaN give 1; else max / amax rounded to nearest, an overflow of
    which becomes ``overflow``; a power of two is the scale with its significand cut off.
    """
    raised = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.full_like(raised, LARGEST[fmt]) / raised
    scale = torch.where(scale.isinf(), overflow, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(raised.isfinite() & (raised != 0), scale, 1.0)


def mx_bytes(amax: Tensor, fmt: Format) -> Tensor:
    """E8M0 bytes for blocks whose largest magnitudes are ``amax`` (fp32); uint8, same shape.

    Real contract (``float_to_e8m0`` in ``common/util/ptx_arch_spec.cuh``): amax times the fp32
    reciprocal of the format's maximum, rounded up to a power of two; inf gives 254, 0 gives 0.
    """
    bits = (amax * torch.tensor(1.0 / LARGEST[fmt])).view(torch.int32)
    exponent, significand = bits >> 23, bits & 0x7FFFFF
    stays = (significand == 0) | ((exponent == 0) & (significand <= _SMALLEST))
    return torch.where(stays, exponent, exponent + 1).clamp(max=0xFE).to(torch.uint8)


def mx_factor(scale_bytes: Tensor) -> Tensor:
    """fp32 factors by which data is multiplied before the cast: 2^(127 - byte); 255 gives NaN.

    Real contract: ``exp2f_rcp`` in ``common/util/ptx.cuh``; until 2.12 byte 0 gives 1; 254
    gives 0 from 2.6 to 2.12.
    """
    if installed_release() < RECIPROCALS_OF_ALL_MX_SCALES:
        bits = (254 - scale_bytes.int()) << 23
        if installed_release() < RECIPROCALS_ARE_BITS:
            bits = torch.where(bits == 0, _SMALLEST, bits)
        return torch.where(scale_bytes == 0, 1.0, bits.view(torch.float32))
    return _power(254 - scale_bytes.int(), scale_bytes)


def mx_unit(scale_bytes: Tensor) -> Tensor:
    """fp32 values of one unit of the codes: 2^(byte - 127); 255 gives NaN."""
    return _power(scale_bytes.int(), scale_bytes)


def mx_amax(matrix: Tensor, axis: int, *, square: bool = False) -> Tensor:
    """Largest magnitude of every block of 32 along ``axis`` of a matrix, fp32; NaN is ignored.

    :param matrix: (rows, columns), both multiples of 32.
    :param axis: 1 gives (rows, columns/32), 0 gives (rows/32, columns).
    :param square: blocks are 32 x 32; the shape of the result still depends on ``axis`` only.
    """
    rows, columns = matrix.shape
    size = magnitude(matrix)
    if square:
        tiles = size.view(rows // MX_BLOCK, MX_BLOCK, columns // MX_BLOCK, MX_BLOCK)
        return tiles.amax((1, 3)).repeat_interleave(MX_BLOCK, 1 - axis)
    if axis == 1:
        return size.view(rows, columns // MX_BLOCK, MX_BLOCK).amax(2)
    return size.view(rows // MX_BLOCK, MX_BLOCK, columns).amax(1)


def spread(per_block: Tensor, axis: int) -> Tensor:
    """Repeat one value per block of 32 along ``axis`` to one value per element."""
    return per_block.repeat_interleave(MX_BLOCK, axis)


def fp8_block_amax(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of every block of a matrix, fp32; NaN is ignored, and the last blocks may
    be incomplete.

    :param block: (rows, columns) of a block; the result has as many elements as there are blocks.
    """
    rows, columns = matrix.shape
    high, wide = block
    size = torch.nn.functional.pad(magnitude(matrix), (0, -columns % wide, 0, -rows % high))
    tiles = size.view(size.shape[0] // high, high, size.shape[1] // wide, wide)
    return tiles.amax((1, 3))


def fp8_block_spread(per_block: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Repeat one value per block to one per element of a matrix of this shape."""
    high, wide = block
    tall = per_block.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    return tall[: shape[0], : shape[1]]


def _power(exponent: Tensor, scale_bytes: Tensor) -> Tensor:
    """2^(exponent - 127) built from its bits; NaN where the byte is 255."""
    bits = torch.where(exponent == 0, _SMALLEST, exponent << 23)
    return torch.where(scale_bytes == 255, _NAN, bits).view(torch.float32)


def magnitude(values: Tensor) -> Tensor:
    """|values| in fp32; 0 for NaN, which the largest magnitude leaves out."""
    return values.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
