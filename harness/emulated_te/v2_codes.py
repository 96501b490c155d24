"""Numbers to FP8 bytes and back, as the CUDA kernels of 2.x do it. No state, no library types."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT_MAX = torch.finfo(torch.float32).max
MX_BLOCK = 32


@dataclass(frozen=True)
class Fp8:
    """One FP8 format; ``code`` is the extension's DType value in 2.x."""

    name: str
    code: int
    dtype: torch.dtype
    max: float


E4M3 = Fp8("e4m3", 7, torch.float8_e4m3fn, 448.0)
E5M2 = Fp8("e5m2", 8, torch.float8_e5m2, 57344.0)
_NAN_BYTE = 0x7F


def fp8(dtype: object) -> Fp8:
    """The format of a DType; ValueError for any other type.

    :param dtype: TransformerEngine's DType or its integer value.
    """
    for known in (E4M3, E5M2):
        if int(dtype) == known.code:  # type: ignore[call-overload]
            return known
    raise ValueError(f"DType {dtype!r} is no FP8 format; pass kFloat8E4M3 or kFloat8E5M2")


def encode(values: Tensor, factor: Tensor, fmt: Fp8) -> Tensor:
    """Codes of ``values * factor`` in the shape of ``values``, uint8.

    The product is taken in fp32, rounded to nearest even and saturated, infinities too; NaN becomes
    0x7F. Real contract: the conversion constructors of CUDA's FP8 types, which TransformerEngine
    calls in ``common/util/vectorized_pointwise.h`` and ``common/transpose/cast_transpose.cu``.

    :param factor: fp32, one element or broadcastable.
    """
    scaled = values.float() * factor
    codes = scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    return torch.where(scaled.isnan(), _NAN_BYTE, codes)


def decode(codes: Tensor, fmt: Fp8) -> Tensor:
    """fp32 values of uint8 codes, exact."""
    return codes.view(fmt.dtype).float()


def largest(values: Tensor) -> Tensor:
    """max|values| as one fp32 element; NaN counts as nothing, an empty tensor as zero.

    Real contract: the kernels reduce with ``fmaxf``, which returns the operand that is not NaN.
    """
    if values.numel() == 0:
        return torch.zeros(1)
    return _without_nan(values.float().abs()).amax().reshape(1)


def current_scale(amax: Tensor, fmt: Fp8, *, power_of_two: bool, epsilon: float) -> Tensor:
    """Scale for data whose largest magnitude is ``amax``; fp32, shape of ``amax``.

    Real contract (``compute_scale_from_amax`` in ``common/recipe/recipe_common.cuh``): amax is
    raised to epsilon; 0, inf and NaN give 1; else max / amax rounded to nearest, an overflow of
    which becomes the largest fp32; a power of two is the scale with its significand cut off.
    """
    raised = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = torch.full_like(raised, fmt.max) / raised
    scale = torch.where(scale.isinf(), torch.full_like(scale, FLOAT_MAX), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    usable = raised.isfinite() & (raised != 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def mx_bytes(amax: Tensor, fmt: Fp8) -> Tensor:
    """E8M0 bytes for blocks whose largest magnitudes are ``amax`` (fp32); uint8, same shape.

    Real contract (``float_to_e8m0`` in ``common/util/ptx_arch_spec.cuh``): amax times the fp32
    reciprocal of the format's maximum, rounded up to a power of two; inf gives 254, 0 gives 0.
    """
    quotient = amax * torch.tensor(1.0 / fmt.max)
    bits = quotient.view(torch.int32)
    exponent = bits >> 23
    significand = bits & 0x7FFFFF
    stays = (significand == 0) | (exponent == 0xFE) | ((exponent == 0) & (significand <= 0x400000))
    rounded = torch.where(stays, exponent, exponent + 1)
    return rounded.clamp(max=0xFE).to(torch.uint8)


def mx_factor(scale_bytes: Tensor) -> Tensor:
    """fp32 factors data is multiplied with before the cast: 2^(127 - byte), 255 is NaN."""
    exponent = 254 - scale_bytes.int()
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent < 0, 0x7FFFFFFF, bits).view(torch.float32)


def mx_unit(scale_bytes: Tensor) -> Tensor:
    """fp32 values of one unit of the codes: 2^(byte - 127), 255 is NaN."""
    exponent = scale_bytes.int()
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FFFFFFF, bits).view(torch.float32)


def mx_amax(matrix: Tensor, axis: int, *, square: bool = False) -> Tensor:
    """Largest magnitude of every block of 32 along ``axis`` of a matrix, fp32.

    :param matrix: (rows, columns), both multiples of 32.
    :param axis: 1 gives (rows, columns/32), 0 gives (rows/32, columns).
    :param square: blocks are 32 x 32; the result keeps the shape that ``axis`` asks for.
    """
    rows, columns = matrix.shape
    magnitude = _without_nan(matrix.float().abs())
    if square:
        tiles = magnitude.view(rows // MX_BLOCK, MX_BLOCK, columns // MX_BLOCK, MX_BLOCK)
        return tiles.amax((1, 3)).repeat_interleave(MX_BLOCK, 1 - axis)
    if axis == 1:
        return magnitude.view(rows, columns // MX_BLOCK, MX_BLOCK).amax(2)
    return magnitude.view(rows // MX_BLOCK, MX_BLOCK, columns).amax(1)


def spread(per_block: Tensor, axis: int) -> Tensor:
    """One value per element from one per block of 32 along ``axis``."""
    return per_block.repeat_interleave(MX_BLOCK, axis)


def _without_nan(magnitude: Tensor) -> Tensor:
    return magnitude.nan_to_num(nan=0.0, posinf=torch.inf)
