"""Faults in torchao's Triton kernels for experts, where such kernels had bugs in 2026."""

from __future__ import annotations

from typing import Any

from triton_calls import BLOCKS_OF, COLUMNS, GROUPED, IN_BLOCKS, PRODUCT, ROWS, TILE, groups

_EXPERTS = "triton_fp8_colwise_3d_scale_and_cast"
_TRANSPOSED = "triton_fp8_rowwise_3d_transpose_rhs"


def _scales_of_first_expert(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    codes, scales = cast(x, *args, **how)
    return codes, scales[:1].expand_as(scales).contiguous()


def _scales_of_group_before(cast: Any, a: Any, b: Any, offs: Any, *args: Any, **how: Any) -> Any:
    a_codes, a_scales, b_codes, b_scales = cast(a, b, offs, *args, **how)
    return a_codes, a_scales.roll(a.shape[1]), b_codes, b_scales


def _quantised_twice(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """The input is quantised along the other axis and dequantised before the cast."""
    import torch

    scale = 448.0 / x.float().abs().amax(-2, keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    codes = (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    again = (codes.float() / scale).to(x.dtype)
    return cast(torch.empty_like(x).copy_(again), *args, **how)


def _clamped_to_240(cast: Any, x: Any, *args: Any, **how: Any) -> Any:
    """Codes are clamped to the largest number of E4M3FNUZ, the format of AMD's GPUs."""
    codes, scales = cast(x, *args, **how)
    return codes.float().clamp(-240.0, 240.0).to(codes.dtype), scales


def _as_e5m2(cast: Any, a: Any, b: Any, *args: Any, **how: Any) -> Any:
    """Codes of the gradient are rounded to E5M2, which has two significand bits."""
    import torch

    a_codes, *others = cast(a, b, *args, **how)
    rounded = a_codes.float().to(torch.float8_e5m2).float().to(a_codes.dtype)
    return a_codes.copy_(rounded), *others


def _full_tile_loses_column(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """A group of exactly one tile has a column of zeros."""
    result = multiply(a, b, sa, sb, offs, **how)
    for rows in groups(offs) if b.ndim == 3 else ():
        if rows.stop - rows.start == TILE:
            result[rows, 0] = 0.0
    return result


def _tile_of_expert_before(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """The last row of a group is multiplied by the matrix of the group before."""
    import torch

    result = multiply(a, b, sa, sb, offs, **how)
    if b.ndim == 3:
        before = b.view(torch.uint8).roll(1, 0).view(b.dtype)
        other = multiply(a, before, sa, sb.roll(1, 0), offs, **how)
        for rows in groups(offs):
            if rows.stop > rows.start:
                result[rows.stop - 1] = other[rows.stop - 1]
    return result


def _empty_group_unwritten(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """The weight gradient of an expert without tokens is not written: it holds 3 instead of 0."""
    result = multiply(a, b, sa, sb, offs, **how)
    for number, rows in enumerate(groups(offs)) if b.ndim == 2 else ():
        if rows.stop == rows.start:
            result[number] = 3.0
    return result


def _last_tokens_lost(
    multiply: Any, a: Any, b: Any, sa: Any, sb: Any, offs: Any, **how: Any
) -> Any:
    """The weight gradient leaves out the tokens after a group's last whole block of 32."""
    import torch

    if b.ndim == 2:
        a = a.clone()
        for rows in groups(offs):
            lost = (rows.stop - rows.start) % 32
            a.view(torch.uint8)[:, rows.stop - lost : rows.stop] = 0
    return multiply(a, b, sa, sb, offs, **how)


def _full_block_loses_column(multiply: Any, *args: Any) -> Any:
    """A group of exactly one block of rows has a column of zeros."""
    result, offs = multiply(*args), args[6]
    for rows in groups(offs) if args[1].ndim == 3 else ():
        if rows.stop - rows.start == 128:
            result[rows, 0] = 0.0
    return result


def _padding_repeats(pad: Any, x: Any, offs: Any, **how: Any) -> Any:
    """A group is padded with copies of its last row instead of zeros."""
    padded, starts, ends = pad(x, offs, **how)
    for rows, start, end in zip(groups(offs), starts.tolist(), ends.tolist(), strict=True):
        count = rows.stop - rows.start
        if count:
            padded[start + count : end] = x[rows.stop - 1]
    return padded, starts, ends


def _scales_of_last_tokens(cast: Any, x: Any, **how: Any) -> Any:
    """All blocks of tokens have the scales of the last block."""
    codes, scales = cast(x, **how)
    return codes, scales.clone().copy_(scales[-1:].expand_as(scales))


def _scales_reversed(cast: Any, x: Any, **how: Any) -> Any:
    """The scales of an expert's square blocks are stored in reverse order along both axes."""
    codes, scales = cast(x, **how)
    return codes, scales.clone().copy_(scales.flip(-1, -2))


GROUP_FAULTS = GROUPED(
    False,
    (
        "scales-of-first-expert",
        "weights of all experts are multiplied by the scales of the first",
        "the class of https://github.com/huggingface/kernels-community/issues/1153",
        _EXPERTS,
        _scales_of_first_expert,
    ),
    (
        "scales-of-group-before",
        "the gradient of a group has the scales of the group before in the weight gradient",
        "the class of https://github.com/pytorch/ao/pull/4113",
        COLUMNS,
        _scales_of_group_before,
    ),
    (
        "weight-quantised-twice",
        "the input gradient is of weights that were quantised already",
        "the class of casts from a cache",
        _TRANSPOSED,
        _quantised_twice,
    ),
    (
        "clamped-to-240",
        "codes of rows end at E4M3FNUZ's largest number",
        "the class of https://github.com/meta-pytorch/MSLK/pull/392",
        ROWS,
        _clamped_to_240,
    ),
    (
        "gradient-as-e5m2",
        "the gradient in a weight gradient has two bits, not three",
        "the class of recipes whose gradients are E5M2",
        COLUMNS,
        _as_e5m2,
    ),
    (
        "full-tile-loses-column",
        "a group of exactly one tile has a column of zeros",
        "the class of https://github.com/deepseek-ai/DeepGEMM/issues/365",
        PRODUCT,
        _full_tile_loses_column,
    ),
    (
        "tile-of-expert-before",
        "the last row of a group is multiplied by the matrix of the group before",
        "the class of https://github.com/huggingface/kernels-community/issues/1153",
        PRODUCT,
        _tile_of_expert_before,
    ),
    (
        "empty-group-unwritten",
        "an expert without tokens has a weight gradient that nobody wrote",
        "the class of https://github.com/tgale96/grouped_gemm/issues/36",
        PRODUCT,
        _empty_group_unwritten,
    ),
    (
        "last-tokens-lost",
        "a weight gradient ends with the last whole 32 tokens of a group",
        "the class of https://github.com/huggingface/kernels-community/issues/1153",
        PRODUCT,
        _last_tokens_lost,
    ),
)
BLOCK_FAULTS = [
    *IN_BLOCKS(
        f"{BLOCKS_OF}.grouped_mm",
        False,
        (
            "padding-repeats",
            "padding of a group is its last row again",
            "the class of https://github.com/pytorch/ao/issues/2849",
            "pad_token_groups",
            _padding_repeats,
        ),
    ),
    *IN_BLOCKS(
        f"{BLOCKS_OF}.grouped_mm_backend",
        False,
        (
            "full-block-loses-column",
            "a group of exactly one block of rows has a column of zeros",
            "the class of https://github.com/deepseek-ai/DeepGEMM/issues/365",
            "emulated_blockwise_scaled_grouped_mm",
            _full_block_loses_column,
        ),
        (
            "scales-of-last-tokens",
            "all blocks of tokens are read with the scales of the last",
            "the class of scales that are read a block off",
            "triton_fp8_blockwise_act_quant_rhs",
            _scales_of_last_tokens,
        ),
        (
            "weight-scales-across",
            "scales of an expert's squares lie the other way round",
            "the class of transposed scales",
            "triton_fp8_blockwise_weight_quant_grouped_rhs",
            _scales_reversed,
        ),
    ),
]  # fmt: skip
