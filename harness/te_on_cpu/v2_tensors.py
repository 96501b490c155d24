"""Building TransformerEngine's quantised tensors, and fitting existing ones to a quantizer.

Memory that is not written yet holds NaN codes and NaN scales, where CUDA would leave its previous
contents, so a read of it shows in results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_on_cpu.kernels import NAN_CODE
from te_on_cpu.refusal import refuse
from te_on_cpu.v2_fp4 import BLOCK as FP4_BLOCK
from te_on_cpu.v2_releases import (
    BLOCKS_HAVE_ONE_LAYOUT,
    BLOCKS_MAY_BE_COMPACT,
    SCALES_MAY_BE_SWIZZLED,
    SQUARE_SCALES_MAY_BE_SWIZZLED,
    STORAGES_KNOW_THEIR_DTYPE,
    TENSORS_ARE_FITTED,
    TENSORS_TAKE_A_DEVICE,
    TRANSFORMED_SCALES_MAY_BE_SWIZZLED,
    installed_release,
)
from te_on_cpu.v2_scales import FP8_BLOCK, MX_BLOCK
from te_on_cpu.v2_types import (
    classes,
    flat_shape,
    is_blockwise,
    is_float8,
    is_mxfp8,
    is_nvfp4,
    keeps_transposes,
    kind,
)


def empty(quantizer: Any, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Any:
    """An unwritten quantised tensor of ``shape`` whose nominal dtype is ``dtype``; a plain tensor
    if ``quantizer`` is None.

    Real contract: ``create_tensor`` of each class in ``pytorch/csrc/quantizer.cpp``. The
    quantizer's ``internal`` decides between storage and torch.Tensor subclass. RuntimeError for
    MXFP8 and NVFP4 if a dimension (all but the last taken together) is no multiple of 32 and 16.
    """
    shape = torch.Size(shape)
    match kind(quantizer):
        case "none":
            return torch.full(shape, torch.nan, dtype=dtype)
        case "mx":
            return _build(classes().mxfp8, quantizer, shape, dtype, _mx_parts(quantizer, shape))
        case "block":
            parts = _block_parts(quantizer, shape)
            return _build(classes().blockwise, quantizer, shape, dtype, parts)
        case "fp4":
            return _build(classes().nvfp4, quantizer, shape, dtype, _fp4_parts(quantizer, shape))
        case _:
            return _build(
                classes().float8, quantizer, shape, dtype, _float8_parts(quantizer, shape)
            )


def fitted(quantizer: Any, tensor: Any) -> Any:
    """``tensor`` with exactly the buffers that ``quantizer`` fills: others are dropped, missing
    ones added.

    Real contract: ``convert_and_update_tensor`` in ``pytorch/csrc/quantizer.cpp``; existing buffers
    keep their memory. Until 2.6 the tensor stays as it is.
    """
    fits, wanted = _BY_KIND[kind(quantizer)]
    if not fits(tensor):
        raise RuntimeError(
            f"{type(quantizer).__name__} cannot write into a {type(tensor).__name__}; "
            "pass the tensor class that belongs to it"
        )
    if installed_release() < TENSORS_ARE_FITTED:
        return tensor
    shape = logical_shape(tensor)
    for name, part in wanted(quantizer, shape).items():
        attribute = _ATTRIBUTES[name]
        if part is None or getattr(tensor, attribute) is None:
            setattr(tensor, attribute, part)
    setattr(tensor, "_fp4_dtype" if is_nvfp4(tensor) else "_fp8_dtype", quantizer.dtype)
    if is_float8(tensor):
        tensor._transpose_invalid = tensor._transpose is None
    for name, layout in _layout(quantizer, shape).items():
        setattr(tensor, f"_{name}", layout)
    return tensor


def logical_shape(tensor: Any) -> torch.Size:
    """Shape of the quantised values, from whichever buffer exists."""
    if is_mxfp8(tensor):
        data = tensor._columnwise_data if tensor._rowwise_data is None else tensor._rowwise_data
    elif is_nvfp4(tensor):
        return _fp4_shape(tensor)
    elif is_blockwise(tensor):
        data = tensor._rowwise_data
        if data is None and tensor._columnwise_data is not None:
            turned = tensor._columnwise_data.shape
            return torch.Size((*turned[1:], turned[0]))
    elif tensor._data is None and tensor._transpose is not None:
        return torch.Size((*tensor._transpose.shape[1:], tensor._transpose.shape[0]))
    else:
        data = tensor._data
    if data is None:
        raise RuntimeError(f"this {type(tensor).__name__} holds no data")
    return data.shape


def mx_scale_shapes(shape: torch.Size) -> tuple[tuple[int, int], tuple[int, int]]:
    """Padded shapes of (row-wise, column-wise) E8M0 scales: multiples of (128, 4) and (4, 128)."""
    rows, columns = flat_shape(shape)
    if rows % MX_BLOCK or columns % MX_BLOCK:
        raise RuntimeError(
            f"MXFP8 quantises blocks of {MX_BLOCK}: {tuple(shape)} has {rows} rows and {columns} "
            "columns; pad both to a multiple"
        )
    row_wise = (_up(rows, 128), _up(columns // MX_BLOCK, 4))
    return row_wise, (_up(rows // MX_BLOCK, 4), _up(columns, 128))


_ATTRIBUTES = {
    "data": "_data",
    "data_transpose": "_transpose",
    "fp8_scale_inv": "_scale_inv",
    "rowwise_data": "_rowwise_data",
    "rowwise_scale_inv": "_rowwise_scale_inv",
    "columnwise_data": "_columnwise_data",
    "columnwise_scale_inv": "_columnwise_scale_inv",
    "amax_rowwise": "_amax_rowwise",
    "amax_columnwise": "_amax_columnwise",
}


def _float8_parts(quantizer: Any, shape: torch.Size) -> dict[str, Tensor | None]:
    one_layout, fitted_ones = keeps_transposes(), installed_release() >= TENSORS_ARE_FITTED
    with_data = quantizer.rowwise_usage or (fitted_ones and not one_layout)
    with_transpose = quantizer.columnwise_usage and one_layout
    if not with_data and not with_transpose:
        raise RuntimeError("the quantizer is set to fill neither row-wise nor column-wise data")
    return {
        "data": _unwritten(shape) if with_data else None,
        "data_transpose": _unwritten((shape[-1], *shape[:-1])) if with_transpose else None,
        "fp8_scale_inv": (
            torch.full((1,), torch.nan)
            if fitted_ones
            else quantizer.scale.detach().reshape(1).reciprocal()
        ),
    }


def _mx_parts(quantizer: Any, shape: torch.Size) -> dict[str, Tensor | None]:
    row_wise, column_wise = mx_scale_shapes(shape)
    rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    return {
        "rowwise_data": _unwritten(shape) if rows else None,
        "rowwise_scale_inv": _unwritten(row_wise, 0xFF) if rows else None,
        "columnwise_data": _unwritten(shape) if columns else None,
        "columnwise_scale_inv": _unwritten(column_wise, 0xFF) if columns else None,
    }


def _block_parts(quantizer: Any, shape: torch.Size) -> dict[str, Tensor | None]:
    """Column-wise codes are stored transposed. Scales are fp32, one for each block of a row or a
    column, stored as (blocks, rows or columns), or one for each block of 128 x 128; the last
    dimension is padded to a multiple of 4 (``Float8BlockQuantizer::get_scale_shape``)."""
    rows, columns = flat_shape(shape)
    down, across = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    if quantizer.block_scaling_dim == 2:
        row_wise, column_wise = (down, _up(across, 4)), (across, _up(down, 4))
    else:
        row_wise, column_wise = (across, _up(rows, 4)), (down, _up(columns, 4))
    by_rows, by_columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    return {
        "rowwise_data": _unwritten(shape) if by_rows else None,
        "rowwise_scale_inv": torch.full(row_wise, torch.nan) if by_rows else None,
        "columnwise_data": _unwritten((shape[-1], *shape[:-1])) if by_columns else None,
        "columnwise_scale_inv": torch.full(column_wise, torch.nan) if by_columns else None,
    }


def _fp4_shape(tensor: Any) -> torch.Size:
    if tensor._rowwise_data is not None:
        shape = tensor._rowwise_data.shape
        return torch.Size((*shape[:-1], 2 * shape[-1]))
    if tensor._columnwise_data is None:
        raise RuntimeError(f"this {type(tensor).__name__} holds no data")
    columns, half = tensor._columnwise_data.shape
    return torch.Size((2 * half, columns))


def _fp4_parts(quantizer: Any, shape: torch.Size) -> dict[str, Tensor | None]:
    """Column-wise codes are those of the transposed matrix. Scales are padded to multiples of 128
    rows and 4 blocks (``NVFP4Quantizer::get_scale_shape``)."""
    rows, columns = flat_shape(shape)
    if rows % FP4_BLOCK or columns % FP4_BLOCK:
        raise RuntimeError(
            f"NVFP4 quantises blocks of {FP4_BLOCK}: {tuple(shape)} has {rows} rows and {columns} "
            "columns; pad both to a multiple"
        )
    by_rows, by_columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    row_wise = _up(rows, 128), _up(columns // FP4_BLOCK, 4)
    column_wise = _up(columns, 128), _up(rows // FP4_BLOCK, 4)
    return {
        "rowwise_data": _unwritten((*shape[:-1], columns // 2)) if by_rows else None,
        "rowwise_scale_inv": _unwritten(row_wise) if by_rows else None,
        "columnwise_data": _unwritten((columns, rows // 2)) if by_columns else None,
        "columnwise_scale_inv": _unwritten(column_wise) if by_columns else None,
        "amax_rowwise": torch.full((1,), torch.nan) if by_rows else None,
        "amax_columnwise": torch.full((1,), torch.nan) if by_columns else None,
    }


def _layout(quantizer: Any, shape: torch.Size) -> dict[str, bool]:
    """What a tensor of MXFP8 or NVFP4 says about the order of its scales."""
    if installed_release() < SCALES_MAY_BE_SWIZZLED:
        return {}
    match kind(quantizer):
        case "mx":
            return {"with_gemm_swizzled_scales": quantizer.optimize_for_gemm}
        case "fp4":
            return {"with_gemm_swizzled_scales": _swizzles_fp4(quantizer, shape)}
        case _:
            return {}


def _block_layout(quantizer: Any) -> dict[str, Any]:
    """What a tensor of FP8 blocks of older releases is told about its layout."""
    if not BLOCKS_MAY_BE_COMPACT <= installed_release() < BLOCKS_HAVE_ONE_LAYOUT:
        return {}
    if quantizer.all_gather_usage:
        refuse("FP8 blocks laid out for an all-gather", "run on one rank")
    return {"data_format": _block_formats().GEMM_READY}


def _block_formats() -> Any:
    import transformer_engine_torch

    return transformer_engine_torch.Float8BlockScaleTensorFormat


def _swizzles_fp4(quantizer: Any, shape: torch.Size) -> bool:
    """Whether the cast writes the scales in the order of the GEMM
    (``nvfp4_emits_gemm_swizzled_scales`` in ``pytorch/csrc/quantizer.cpp``)."""
    rows, columns = flat_shape(shape)
    if not quantizer.optimize_for_gemm or torch.cuda.get_device_capability()[0] < 10:
        return False
    if quantizer.with_rht:
        fits = rows % 64 == 0 and columns % 128 == 0
        return fits and installed_release() >= TRANSFORMED_SCALES_MAY_BE_SWIZZLED
    if installed_release() < SQUARE_SCALES_MAY_BE_SWIZZLED:
        return False
    return bool(quantizer.with_2d_quantization) and rows % 128 == 0 and columns % 128 == 0


#: Kind of quantizer -> (is it a tensor of its class?, the parts that it fills).
_BY_KIND: dict[str, tuple[Callable[[object], bool], Callable[..., dict[str, Tensor | None]]]] = {
    "delayed": (is_float8, _float8_parts),
    "current": (is_float8, _float8_parts),
    "mx": (is_mxfp8, _mx_parts),
    "block": (is_blockwise, _block_parts),
    "fp4": (is_nvfp4, _fp4_parts),
}


def _build(
    pair: tuple[type, type],
    quantizer: Any,
    shape: torch.Size,
    dtype: torch.dtype,
    parts: dict[str, Tensor | None],
) -> Any:
    form = "fp4_dtype" if pair is classes().nvfp4 else "fp8_dtype"
    common: dict[str, Any] = {**parts, form: quantizer.dtype, "quantizer": quantizer}
    common |= _layout(quantizer, shape)
    if pair is classes().blockwise:
        common["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        common |= _block_layout(quantizer)
    storage, tensor = pair
    if quantizer.internal and installed_release() < STORAGES_KNOW_THEIR_DTYPE:
        return storage(**common)
    if quantizer.internal:
        return storage(**common, fake_dtype=dtype)
    if installed_release() >= TENSORS_TAKE_A_DEVICE:
        common["device"] = torch.device("cpu")
    return tensor(shape=shape, dtype=dtype, **common)


def _unwritten(shape: tuple[int, ...] | torch.Size, byte: int = NAN_CODE) -> Tensor:
    return torch.full(tuple(shape), byte, dtype=torch.uint8)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """The extension's function: ``empty``; every device is the CPU.

    Real contract: ``pytorch/csrc/extensions/cast.cpp``.
    """
    if pin_memory:
        refuse("pinned memory", "leave pin_memory off")
    return empty(quantizer, tuple(shape), dtype)
