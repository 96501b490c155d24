"""NVFP4 of the 2.x extension: E2M1 codes with an E4M3 scale for each 16 of a row or a column and
one fp32 number, the largest magnitude, for the tensor.

Two codes lie in a byte, the first in the low half. Column-wise data is that of the transposed
matrix. Real contract, unless said otherwise: ``common/cast/nvfp4/core_nvfp4.cuh`` and
``quantize_transpose_nvfp4.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from te_on_cpu.kernels import cast, dequantise
from te_on_cpu.refusal import refuse
from te_on_cpu.v2_releases import NVFP4, installed_release
from te_on_cpu.v2_scales import magnitude
from te_on_cpu.v2_types import flat_shape
from te_on_cpu.watch import Cast, Operand, has_listeners, notify

Side = Literal["rowwise", "columnwise"]
BLOCK = 16
_LARGEST, _SCALE_LARGEST = 6.0, 448.0
_FLOAT_MAX = torch.finfo(torch.float32).max
#: The magnitudes of codes 0 to 7; bit 3 is the sign.
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
#: Between neighbours. A tie goes to the even code, so the ties below codes 2, 4 and 6 go up.
_HALVES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
#: Rows of the matrix of the Hadamard transform.
_SIZE = 16


def codes_of(scaled: Tensor) -> Tensor:
    """uint8 codes, 0 to 15, of fp32 values, saturating; NaN gives +6.

    Real contract: ``cvt.rn.satfinite.e2m1x2.f32`` of the PTX ISA.
    """
    size = scaled.abs().contiguous()
    up = torch.bucketize(size, _HALVES, right=True)
    down = torch.bucketize(size, _HALVES, right=False)
    code = torch.where(up % 2 == 0, up, down)
    code = code + 8 * torch.signbit(scaled)
    return torch.where(scaled.isnan(), 7, code).to(torch.uint8)


def codes_by_chance(scaled: Tensor) -> Tensor:
    """uint8 codes of fp32 values, each one of the two neighbours, the farther one the less likely:
    a value that has a code keeps it; saturating; NaN gives +6.

    Real contract: ``stochastic_round_fp4_e2m1`` in ``common/util/ptx.cuh``, which does in software
    what ``cvt.rs.satfinite.e2m1x4.f32`` does: 8 random bits, as a part of the step, are added to
    the magnitude, and the sum is rounded towards zero. Hardware takes them from Philox, at an
    offset of the default CUDA generator that moves on with every call
    (``NVFP4Quantizer::quantize_impl``); here they are drawn from that generator itself, so they
    depend on its seed in the same way, but are others.
    """
    generator = torch.cuda.default_generators[0]
    part = torch.randint(256, scaled.shape, generator=generator).float() / 256
    size = scaled.abs()
    raised = (size.double() + part * _step(size)).float()
    low = (raised / _step(raised)).floor() * _step(raised)
    return codes_of(torch.where(scaled.isnan(), scaled, low.copysign(scaled)))


def _step(size: Tensor) -> Tensor:
    """The distance of the two numbers of E2M1 that are next to these magnitudes, up to 6."""
    return torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5))


def values_of(codes: Tensor) -> Tensor:
    """fp32 values of uint8 codes, 0 to 15; the sign of a zero included."""
    size = _VALUES[(codes & 7).long()]
    return torch.where(codes > 7, -size, size)


def packed(codes: Tensor) -> Tensor:
    """Two codes in a byte, along the last dimension."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpacked(data: Tensor) -> Tensor:
    """One code in a byte, along the last dimension."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def codes_in(data: Tensor) -> Tensor:
    """The matrix of codes of a tensor's data, which may have no columns."""
    return unpacked(data.reshape(math.prod(data.shape[:-1]), data.shape[-1]))


def hadamard(matrix: Tensor, signs: int) -> Tensor:
    """Each 16 of a row of a bf16 matrix, multiplied by signs and a Hadamard matrix over 4.

    :param signs: a bit for each of the sixteen, 1 for a minus.

    Real contract (``common/hadamard_transform``): sums in fp32, in an order of the hardware's,
    rounded to bf16. The fused kernel casts what is rounded so, too, unless ``NVTE_USE_FAST_MATH``
    is set. Emulated with exact sums that are rounded once.
    """
    places = torch.arange(_SIZE)
    together = places[:, None] & places[None, :]
    parity = sum((together >> bit) & 1 for bit in range(4)) + (signs >> places)[:, None]
    transform = torch.where(parity % 2 == 1, -0.25, 0.25).double()
    turned = matrix.double().reshape(-1, _SIZE) @ transform
    return _bf16(turned.view(matrix.shape))


def _bf16(exact: Tensor) -> Tensor:
    """fp64 values as bf16, rounded once: over fp32, an odd number if it is not exact."""
    near = exact.float()
    toward_zero = torch.where(near.abs().double() > exact.abs(), 1, 0)
    bits = near.view(torch.int32) - toward_zero.int()
    other = near.isfinite() & (near.double() != exact)
    return torch.where(other, bits | 1, near.view(torch.int32)).view(torch.float32).bfloat16()


def encode_scale(amax: Tensor) -> Tensor:
    """The factor that maps a tensor with this largest magnitude to the range of the formats; 1 for
    0 and inf (``compute_global_encode_scaling_factor_FP4``)."""
    scale = (torch.full_like(amax, _LARGEST * _SCALE_LARGEST) / amax).clamp(max=_FLOAT_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def block_scales(matrix: Tensor, amax: Tensor, *, square: bool) -> Tensor:
    """E4M3 bytes of the scales of each 16 of a row, (rows, columns / 16).

    :param amax: the tensor's largest magnitude, one fp32 element.
    :param square: the largest magnitude of a block of 16 x 16 counts for each of its rows.
    """
    rows, columns = matrix.shape
    largest = magnitude(matrix).view(rows, columns // BLOCK, BLOCK).amax(2)
    if square:
        tiles = largest.view(rows // BLOCK, BLOCK, columns // BLOCK).amax(1)
        largest = tiles.repeat_interleave(BLOCK, 0)
    # constants and products in fp32, in this order
    factor = encode_scale(amax) * (torch.tensor(1.0) / torch.tensor(_LARGEST))
    return cast((largest * factor).clamp(max=_FLOAT_MAX), torch.ones(1), "e4m3")


def factors(scales: Tensor, amax: Tensor) -> Tensor:
    """What the elements of each block are multiplied by before the cast, fp32."""
    decoded = dequantise(scales, None, "e4m3", torch.float32)
    return (1.0 / (decoded * encode_scale(amax).reciprocal())).clamp(max=_FLOAT_MAX)


def write_fp4(values: Tensor, quantizer: Any, target: Any, found: Tensor | None) -> None:
    """Write codes, scales and largest magnitudes of both directions.

    Real contract (``NVFP4Quantizer::quantize_impl`` in ``pytorch/csrc/quantizer.cpp``): with the
    Hadamard transform, which is of bf16 alone, the column-wise direction is that of the transformed
    transposed matrix and has the largest magnitude of this. Without it both have one, which an
    earlier kernel may have ``found``.
    What is rounded stochastically are codes, never scales, by other random numbers in each
    direction.
    A cast is reported for each direction, as it lies in the matrix, which is not transformed there.
    """
    _check(values, quantizer)
    matrix = values.view(flat_shape(values.shape))
    for side, lines in _lines(matrix, quantizer):
        data, padded, amax = parts_of(target, side)
        if data is None:
            continue
        largest = magnitude(lines).amax().reshape(1) if found is None else found
        scales = block_scales(lines, largest, square=quantizer.with_2d_quantization)
        scaled = lines.float() * factors(scales, largest).repeat_interleave(BLOCK, 1)
        codes = codes_by_chance(scaled) if quantizer.stochastic_rounding else codes_of(scaled)
        data.view(len(codes), -1).copy_(packed(codes))
        amax.copy_(largest)
        padded.zero_()
        padded[: scales.shape[0], : scales.shape[1]] = scales
        if has_listeners():
            seen = both_levels(scales, largest)[:: BLOCK if quantizer.with_2d_quantization else 1]
            if side == "columnwise":
                codes, seen = codes.t(), seen.t()
            notify(Cast(matrix, codes, seen, None, "e2m1"))


def _check(values: Tensor, quantizer: Any) -> None:
    if installed_release() < NVFP4:
        refuse("the casts to NVFP4 of releases before 2.14", "use 2.14 or later")
    if quantizer.with_rht and values.dtype != torch.bfloat16:
        raise RuntimeError(f"the Hadamard transform is of bf16 alone, got {values.dtype}")
    if quantizer.with_rht and not quantizer.with_post_rht_amax:
        raise RuntimeError("the largest magnitude before the Hadamard transform is not supported")
    modes = ("row_scaled_nvfp4", "nvfp4_use_4over6")  # from 2.16 and from 2.17 on
    if any(getattr(quantizer, mode, False) for mode in modes):
        refuse("NVFP4 scaled by rows, or 4 over 6", "use the recipe's defaults")
    if quantizer.with_amax_reduction:
        refuse("the reduction of NVFP4's amax over ranks", "run on one rank")


def _lines(matrix: Tensor, quantizer: Any) -> Iterator[tuple[Side, Tensor]]:
    """What each direction quantises along its rows."""
    yield "rowwise", matrix
    turned = matrix.t().contiguous()
    signs = quantizer.rht_matrix_random_sign_mask_t
    yield "columnwise", hadamard(turned, signs) if quantizer.with_rht else turned


def parts_of(tensor: Any, side: Side) -> tuple[Any, Any, Any]:
    """Data, scales and amax of a side, None where there is none."""
    data, scales = (getattr(tensor, f"_{side}_{name}") for name in ("data", "scale_inv"))
    return data, scales, getattr(tensor, f"_amax_{side}")


def both_levels(scales: Tensor, amax: Tensor) -> Tensor:
    """int64 of the bits of the tensor's amax and, in the lowest byte, each block's E4M3 scale."""
    return (amax.view(torch.int32).long() << 8) | scales.long()


def operand_of(tensor: Any, side: Side, name: str) -> tuple[Tensor, Tensor, Operand]:
    """fp32 values in units of the tensor's own scale, the matrix as it lies in the tensor; the
    tensor's amax; and the operand. RuntimeError if the side is missing.

    Real contract (``CanonicalizeGemmInput`` in ``common/gemm/cublaslt_gemm.cu``): FP4 multiplies in
    one layout, so a side is read row by row or, from the column-wise data, column by column.
    """
    data, padded, amax = parts_of(tensor, side)
    if data is None:
        raise RuntimeError(f"operand {name} of the NVFP4 GEMM lacks {side} data")
    codes = codes_in(data)
    if codes.shape[1] % 32:
        raise RuntimeError(
            f"operand {name} of the NVFP4 GEMM is contracted over {codes.shape[1]} elements: "
            "pad to a multiple of 32"
        )
    scales = padded[: len(codes), : codes.shape[1] // BLOCK]
    units = dequantise(scales, None, "e4m3", torch.float32).repeat_interleave(BLOCK, 1)
    values, seen = values_of(codes) * units, both_levels(scales, amax)
    if tensor._quantizer.with_2d_quantization:
        squares = seen[::BLOCK]
        if torch.equal(squares.repeat_interleave(BLOCK, 0), seen):  # as a cast reports them
            seen = squares
    if side == "columnwise":
        codes, values, seen = codes.t(), values.t(), seen.t()
    return values, amax, Operand(codes, seen, "e2m1")


def product_scale(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """The factor of a product of two tensors with these amaxes, rounded as on the device
    (``compute_nvfp4_per_tensor_scale_kernel`` in ``common/recipe/nvfp4.cu``)."""
    both = torch.tensor(_LARGEST * _LARGEST * _SCALE_LARGEST * _SCALE_LARGEST)
    return torch.tensor(alpha) * a * b * (torch.tensor(1.0) / both)


def dequantise_fp4(tensor: Any, dtype: torch.dtype) -> Tensor:
    """Values of the row-wise data as ``dtype``, rounded once.

    Real contract: ``common/cast/nvfp4/dequantize_nvfp4.cuh``.
    """
    data, padded, amax = parts_of(tensor, "rowwise")
    if data is None:
        refuse("dequantize of column-wise NVFP4 data")
    codes = codes_in(data)
    scales = dequantise(
        padded[: len(codes), : codes.shape[1] // BLOCK], None, "e4m3", torch.float32
    )
    one = torch.tensor(1.0) / torch.tensor(_LARGEST * _SCALE_LARGEST)
    units = (scales * amax * one).repeat_interleave(BLOCK, 1)
    return (values_of(codes) * units).to(dtype).view(*data.shape[:-1], codes.shape[1])
