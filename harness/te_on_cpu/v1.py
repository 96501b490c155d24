"""Casts, transposes and updates of TransformerEngine 1.x's extension.

Arguments are those of transformer_engine/pytorch/csrc (extensions/*.cu and ts_fp8_op.cpp).
As there, a scale, amax or inverse is passed as a tensor and an offset in elements, and an empty
tensor is a null pointer. Functions that differ between versions take the installed one as
``since``: from 1.11 on a cast writes 1/scale as well, before only the Python layer and the update
do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_on_cpu import kernels
from te_on_cpu.v1_names import FORMAT, TORCH_DTYPE, DType
from te_on_cpu.watch import Cast, Update, has_listeners, notify

Version = tuple[int, int]


def cell(tensor: Tensor, offset: int) -> Tensor | None:
    """The element at ``offset`` of ``tensor``, sharing its memory; None if ``tensor`` is empty."""
    if tensor.numel() == 0:
        return None
    return torch.as_strided(tensor, (), (), tensor.storage_offset() + int(offset))


def quantise(
    values: Tensor,
    scale: Tensor,
    amax: Tensor,
    scale_inv: Tensor,
    otype: int,
    *,
    since: Version,
    scale_offset: int = 0,
    amax_offset: int = 0,
    scale_inv_offset: int = 0,
) -> Tensor:
    """The part common to all casting kernels: returns uint8 codes in the shape of ``values`` and
    writes amax and 1/scale."""
    if values.numel() == 0:
        return torch.empty(values.shape, dtype=torch.uint8)
    factor, largest = cell(scale, scale_offset), cell(amax, amax_offset)
    inverse = cell(scale_inv, scale_inv_offset)
    format = FORMAT[DType(otype)]
    codes = kernels.cast(values, factor, format, largest)
    applied = torch.ones(()) if factor is None else factor
    if inverse is not None and since >= (1, 11):
        inverse.copy_(torch.reciprocal(applied))
    if has_listeners():
        notify(Cast(values, codes, applied.clone(), largest, format))
    return codes


def cast_to_fp8(*arguments: Any, since: Version, **offsets: int) -> Tensor:
    """(input, scale, amax, scale_inv, otype) -> codes. extensions/cast.cu."""
    return quantise(*arguments, since=since, **offsets)


def cast_to_fp8_noalloc(
    input: Tensor,
    scale: Tensor,
    output: Tensor,
    amax: Tensor,
    scale_inv: Tensor,
    otype: int,
    *,
    since: Version,
    **offsets: int,
) -> None:
    """Codes into ``output``. extensions/cast.cu."""
    output.copy_(quantise(input, scale, amax, scale_inv, otype, since=since, **offsets))


def cast_from_fp8(
    input: Tensor, scale_inv: Tensor, itype: int, otype: int, scale_inv_offset: int = 0
) -> Tensor:
    """Codes times 1/scale. extensions/cast.cu."""
    format, dtype = FORMAT[DType(itype)], TORCH_DTYPE[DType(otype)]
    return kernels.dequantise(input, cell(scale_inv, scale_inv_offset), format, dtype)


def fused_cast_transpose_noop(
    input: Tensor,
    noop: Tensor,
    scale: Tensor,
    amax: Tensor,
    scale_inv: Tensor,
    input_cast: Tensor,
    input_transpose: Tensor,
    otype: int,
    *,
    since: Version,
    **offsets: int,
) -> None:
    """Codes [m, n] and their transpose into given buffers; writes nothing if noop[0] is 1."""
    if noop.numel() and noop.item() == 1.0:
        return
    codes = quantise(input, scale, amax, scale_inv, otype, since=since, **offsets)
    input_cast.copy_(codes)
    input_transpose.copy_(codes.T)


def fused_cast_transpose_bgrad(
    grad_output: Tensor,
    scale: Tensor,
    amax: Tensor,
    scale_inv: Tensor,
    otype: int,
    *,
    since: Version,
    **offsets: int,
) -> list[Tensor]:
    """[bias gradient (summed from the input, not from its codes), codes, their transpose]."""
    grad_bias = kernels.column_sums(grad_output, grad_output.dtype)
    codes = quantise(grad_output, scale, amax, scale_inv, otype, since=since, **offsets)
    return [grad_bias, codes, codes.T.contiguous()]


def fp8_transpose(input: Tensor, _otype: int) -> Tensor:
    """Codes [m, n] -> [n, m]."""
    return input.T.contiguous()


def fp8_transpose_noalloc(input: Tensor, output: Tensor, _otype: int) -> None:
    """Codes [m, n] -> ``output`` [n, m]."""
    output.copy_(input.T)


def fp8_transpose_noalloc_noop(input: Tensor, output: Tensor, noop: Tensor, _otype: int) -> None:
    """Codes [m, n] -> ``output`` [n, m]; writes nothing if noop[0] is 1."""
    if not (noop.numel() and noop.item() == 1.0):
        output.copy_(input.T)


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor,
    histories: list[Tensor],
    scales: list[Tensor],
    scale_invs: list[Tensor],
    algorithm: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """Roll histories, derive scales and inverses, in place. extensions/recipe.cu."""
    if has_listeners():
        notify(Update(tuple(histories), tuple(scales)))
    kernels.update_amax_and_scale(
        reduced,
        histories,
        scales,
        scale_invs,
        algorithm=algorithm,
        format=FORMAT[DType(fp8_dtype)],
        margin=margin,
    )
