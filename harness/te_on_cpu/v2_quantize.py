"""The quantising functions of the 2.x extension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_on_cpu.kernels import (
    cast,
    column_sums,
    dequantise,
    keep_largest,
    update_amax_and_scale,
)
from te_on_cpu.refusal import refuse
from te_on_cpu.v2_fp4 import dequantise_fp4, write_fp4
from te_on_cpu.v2_releases import (
    BIAS_GRADIENTS_WITHOUT_TRANSPOSES,
    BLOCKS_HEED_THE_FLAG,
    EVERY_QUANTIZER_HAS_A_PATH,
    TRANSPOSES_KEEP_DIMENSIONS,
    installed_release,
)
from te_on_cpu.v2_scales import (
    FP8_BLOCK,
    current_scale,
    fp8_block_amax,
    fp8_block_spread,
    largest,
    mx_amax,
    mx_bytes,
    mx_factor,
    mx_unit,
    spread,
)
from te_on_cpu.v2_tensors import empty, fitted, logical_shape
from te_on_cpu.v2_types import (
    flat_shape,
    fp8_format,
    is_float8,
    is_mxfp8,
    is_nvfp4,
    keeps_transposes,
    kind,
    torch_dtype,
)
from te_on_cpu.watch import Cast, Update, has_listeners, notify


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """``tensor`` quantised, in a new tensor or into ``output``'s own buffers; returns it.

    Real contract (``quantize`` in ``pytorch/csrc/extensions/cast.cpp``): a ``noop`` whose element
    is 1 leaves codes, scales and amax unchanged, but ``output`` still gets the buffers of the
    quantizer's usages; until 2.7 FP8 blocks are written. An empty tensor is not written.
    """
    if kind(quantizer) == "none":
        raise RuntimeError("quantize needs a quantizer, got None")
    source = tensor.detach().contiguous()
    target = (
        empty(quantizer, source.shape, source.dtype)
        if output is None
        else fitted(quantizer, output)
    )
    heeded = kind(quantizer) != "block" or installed_release() >= BLOCKS_HEED_THE_FLAG
    if noop is None or float(noop) != 1.0 or not heeded:
        write(source, quantizer, target)
    return target


def write(values: Tensor, quantizer: Any, target: Any, amax: Tensor | None = None) -> None:
    """Quantise ``values`` (fp32, bf16 or fp16, of ``target``'s shape) into the buffers that
    ``target`` has.

    Fused kernels pass fp32 values that were never rounded to the tensor's own dtype.
    :param amax: of current scaling and NVFP4, the largest magnitude that an earlier kernel found;
        by default that of ``values``.
    """
    if values.numel() == 0:
        return
    match kind(quantizer):
        case "mx":
            _write_mx(values, quantizer, target)
        case "block":
            _write_blockwise(values, quantizer, target)
        case "fp4":
            write_fp4(values, quantizer, target, amax)
        case _:
            _write_float8(values, quantizer, target, amax)


def _write_float8(values: Tensor, quantizer: Any, target: Any, found: Tensor | None) -> None:
    """Write codes, their transpose and 1/scale of a per-tensor scaled tensor.

    Real contract: delayed scaling multiplies with the scale in the recipe's table and raises the
    amax cell to max|values|, an atomic maximum: earlier casts of the step count
    (``common/util/vectorized_pointwise.h``, ``common/transpose/cast_transpose.cu``). Current
    scaling computes amax and scale first (``common/recipe/current_scaling.cu``) and stores neither.
    """
    if target._data is None:
        raise NotImplementedError(
            "per-tensor FP8 cannot be quantised column-wise alone on a device that keeps transposes"
        )
    fmt = fp8_format(quantizer.dtype)
    if kind(quantizer) == "delayed":
        scale, amax = quantizer.scale.detach().reshape(1), quantizer.amax.detach()
        codes = cast(values, scale, fmt, amax)
    else:
        amax = largest(values) if found is None else found
        scale = _current_scale(amax, quantizer)
        codes = cast(values, scale, fmt)
    target._data.copy_(codes)
    if target._transpose is not None and not target._transpose_invalid:
        rows, columns = flat_shape(codes.shape)
        target._transpose.view(columns, rows).copy_(codes.view(rows, columns).t())
    target._scale_inv.copy_(scale.reciprocal())
    if has_listeners():
        notify(Cast(values, codes, scale.clone(), amax, fmt))


def _current_scale(amax: Tensor, quantizer: Any) -> Tensor:
    if quantizer.with_amax_reduction:
        refuse("the reduction of current scaling's amax over ranks", "run on one rank")
    return current_scale(
        amax,
        fp8_format(quantizer.dtype),
        power_of_two=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )


def _write_mx(values: Tensor, quantizer: Any, target: Any) -> None:
    """Write row-wise and column-wise codes with their E8M0 scales, each from the values themselves.

    Real contract (``common/cast/mxfp8/quantize_mxfp8.cuh``): blocks of 32 along rows, or along
    columns, or of 32 x 32 if the recipe has two-dimensional blocks. The emulation never reorders
    scales for the GEMM, even in a tensor whose flag states that they are swizzled.
    A cast is reported for each direction.
    """
    matrix = values.view(flat_shape(values.shape))
    fmt = fp8_format(quantizer.dtype)
    square = getattr(quantizer, "with_2d_quantization", False)  # 2.18 and before have none
    for axis, side in ((1, "rowwise"), (0, "columnwise")):
        data = getattr(target, f"_{side}_data")
        if data is None:
            continue
        scales = mx_bytes(mx_amax(matrix, axis, square=square), fmt)
        codes = cast(matrix, spread(mx_factor(scales), axis), fmt).view(values.shape)
        data.copy_(codes)
        padded = getattr(target, f"_{side}_scale_inv")
        padded.zero_()
        padded[: scales.shape[0], : scales.shape[1]] = scales
        if has_listeners():
            notify(Cast(values, codes, scales, None, fmt))


def _write_blockwise(values: Tensor, quantizer: Any, target: Any) -> None:
    """Write row-wise codes and transposed column-wise ones with their fp32 scales, each from the
    values themselves.

    Real contract: blocks of 1 x 128 along rows, and along columns
    (``common/transpose/quantize_transpose_vector_blockwise.cu``), or blocks of 128 x 128, whose two
    copies have the same codes (``quantize_transpose_square_blockwise.cu``). Incomplete blocks count
    as filled with zeros. Where max / amax overflows, the scale is the largest number of the
    tensor's dtype (``compute_scale_from_types``).
    A cast is reported for each direction; for 128 x 128 blocks one, as both have its codes.
    """
    matrix, square = values.view(flat_shape(values.shape)), quantizer.block_scaling_dim == 2
    fmt, reported = fp8_format(quantizer.dtype), False
    for side in ("rowwise", "columnwise"):
        data, inverse = (getattr(target, f"_{side}_{part}") for part in ("data", "scale_inv"))
        if data is None:
            continue
        block = fp8_block(square=square, side=side)
        scales = current_scale(
            fp8_block_amax(matrix, block),
            fmt,
            power_of_two=quantizer.force_pow_2_scales,
            epsilon=quantizer.amax_epsilon,
            overflow=torch.finfo(values.dtype).max,
        )
        codes = cast(matrix, fp8_block_spread(scales, block, matrix.shape), fmt)
        stored = codes if side == "rowwise" else codes.t()
        data.view(stored.shape).copy_(stored)
        held = scales.reciprocal() if _as_blocks_lie(block, side) else scales.reciprocal().t()
        inverse.zero_()
        inverse[: held.shape[0], : held.shape[1]] = held
        if has_listeners() and not reported:
            reported = square
            notify(Cast(values, codes.view(values.shape), scales, None, fmt))


def fp8_block(*, square: bool, side: str) -> tuple[int, int]:
    """(rows, columns) of a block of FP8 block scaling in this direction."""
    if square:
        return FP8_BLOCK, FP8_BLOCK
    return (1, FP8_BLOCK) if side == "rowwise" else (FP8_BLOCK, 1)


def _as_blocks_lie(block: tuple[int, int], side: str) -> bool:
    """Whether scales are stored as their blocks lie in the matrix, and not transposed."""
    square = block[0] == block[1]
    return square == (side == "rowwise")


def fp8_block_scales(tensor: Any, side: str) -> tuple[Tensor, tuple[int, int]]:
    """1/scale of each block of a side ("rowwise" or "columnwise"), as the blocks lie in the matrix
    and without padding; and (rows, columns) of a block."""
    rows, columns = flat_shape(logical_shape(tensor))
    high, wide = block = fp8_block(square=tensor._is_2D_scaled, side=side)
    inverse = getattr(tensor, f"_{side}_scale_inv")
    lying = inverse if _as_blocks_lie(block, side) else inverse.t()
    return lying[: -(-rows // high), : -(-columns // wide)], block


def mx_scales(tensor: Any, side: str) -> Tensor:
    """E8M0 bytes of a side ("rowwise" or "columnwise") without padding, one per block."""
    rows, columns = flat_shape(getattr(tensor, f"_{side}_data").shape)
    scales = getattr(tensor, f"_{side}_scale_inv")
    if side == "rowwise":
        return scales[:rows, : columns // 32]
    return scales[: rows // 32, :columns]


def dequantize(input: Any, otype: Any) -> Tensor:
    """Values of a quantised tensor as ``otype``, a DType: code times 1/scale, rounded once.

    Real contract: ``common/cast/fp8/dequantize_fp8.cuh`` and, reading row-wise data if there is
    any and column-wise data if not, ``common/cast/mxfp8/dequantize_mxfp8.cuh``.
    """
    dtype = torch_dtype(otype)
    if is_float8(input):
        if input._data is None:
            raise RuntimeError(
                "dequantize needs row-wise data, this tensor holds its transpose only"
            )
        return dequantise(input._data, input._scale_inv, fp8_format(input._fp8_dtype), dtype)
    if is_mxfp8(input):
        side, axis = ("columnwise", 0) if input._rowwise_data is None else ("rowwise", 1)
        data = getattr(input, f"_{side}_data")
        units = spread(mx_unit(mx_scales(input, side)), axis)
        codes = data.view(units.shape)
        return dequantise(codes, units, fp8_format(input._fp8_dtype), dtype).view(data.shape)
    if is_nvfp4(input):
        return dequantise_fp4(input, dtype)
    refuse(f"dequantize of a {type(input).__name__}")


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    """[bias gradient, quantised gradient]; the first is the sum over all but the last dimension.

    Real contract (``pytorch/csrc/extensions/bias.cpp``): summed in fp32, rounded to the gradient's
    dtype; without a quantizer the gradient itself is returned, contiguous.
    """
    source = input.detach().contiguous()
    bias = column_sums(source.view(flat_shape(source.shape)), source.dtype)
    fused: tuple[str, ...] = ("delayed", "mx")
    if installed_release() < EVERY_QUANTIZER_HAS_A_PATH:
        fused = ("delayed", "mx", "current")
        if kind(quantizer) not in fused:
            raise RuntimeError("this release has no kernel for a bias gradient beside this cast")
    if quantizer is None:
        return [bias, source]
    lacking = installed_release() < BIAS_GRADIENTS_WITHOUT_TRANSPOSES and keeps_transposes()
    per_tensor = kind(quantizer) in fused and kind(quantizer) != "mx"
    both = quantizer.rowwise_usage and quantizer.columnwise_usage
    if lacking and per_tensor and source.numel() and not both:
        raise RuntimeError(
            "this release has no kernel for a bias gradient beside a cast without a transpose on "
            "GPU with compute capability < 10.0"
        )
    return [bias, quantize(source, quantizer)]


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None) -> Tensor:
    """The bytes of ``input`` (..., columns) as (columns, ...), new or into ``out``.

    Real contract: ``pytorch/csrc/extensions/transpose.cpp``.
    """
    rows, columns = flat_shape(input.shape)
    if out is None:
        kept = installed_release() >= TRANSPOSES_KEEP_DIMENSIONS
        others = input.shape[:-1] if kept else (rows,)
        out = torch.empty((columns, *others), dtype=torch.uint8)
    out.view(columns, rows).copy_(input.reshape(rows, columns).t())
    return out


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Store max|input| in ``amax``, one fp32 element.

    Real contract: ``pytorch/csrc/extensions/recipe.cpp``.
    """
    keep_largest(amax.zero_(), input.detach())


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Mark scales as swizzled without moving them, as the emulated GEMM reads them plain.

    Real contract: ``pytorch/csrc/extensions/swizzle.cpp``.
    """
    if is_mxfp8(tensor) or is_nvfp4(tensor):
        tensor._with_gemm_swizzled_scales = True


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Roll histories (length, n) and recompute scales (n,) in place, one table after another.

    Real contract: ``kernels.update_amax_and_scale``; 1/scale belongs to the tensors in 2.x.
    """
    if has_listeners():
        notify(Update(tuple(amax_histories), tuple(scales)))
    update_amax_and_scale(
        amax_reduction_buffer,
        amax_histories,
        scales,
        None,
        algorithm=amax_compute_algo,
        format=fp8_format(fp8_dtype),
        margin=margin,
    )
