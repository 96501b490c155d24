"""Emulated products of scaled codes, for which a CPU has no kernel.

Those of cuBLAS from compute capability 10.0 on: E4M3 codes with one power of two for each 32 of
them (MXFP8), or E2M1 codes with one E4M3 scale for each 16 and one fp32 scale for the tensor
(NVFP4). Block scales lie in tiles of 128 rows by 4 blocks, as cuBLAS documents ("1D block scaling
factors layout"). MXFP8 is summed in fp32, in this CPU's order; NVFP4 in fp64. And those of CUTLASS
from 9.0 on: E4M3 codes in groups with one fp32 scale per row, summed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

#: The values of E2M1's sixteen codes.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])


def mx_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``torch._scaled_mm`` of E4M3 codes [M, K] and [K, N] with E8M0 scales in tiles -> [M, N]. For
    other scales torch's own function for the CPU."""
    if scale_a.dtype != torch.float8_e8m0fnu:
        return torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    rows = _scaled(a.float(), scale_a, 32)
    columns = _scaled(b.t().float(), scale_b, 32)
    result = rows @ columns.t()
    return (result if bias is None else result + bias.float()).to(out_dtype)


def nvfp4_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Any,
    scale_recipe_a: Any,
    scale_b: Any,
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    **more: Any,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_mm`` of packed E2M1 codes [M, K / 2] and [K / 2, N] -> [M, N],
    each with [block scales in tiles, scale of the tensor]. For other codes torch's own function for
    the CPU."""
    if a.dtype != torch.float4_e2m1fn_x2:
        return torch.nn.functional.scaled_mm(
            a, b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, bias,
            output_dtype, **more,
        )  # fmt: skip
    # multiply by the scale of the tensor element by element: if it is infinite, zeros become NaN
    rows = _scaled(_unpacked(a), scale_a[0], 16).double() * scale_a[1].double()
    columns = _scaled(_unpacked(b.t()), scale_b[0], 16).double() * scale_b[1].double()
    result = (rows @ columns.t()).float()
    return (result if bias is None else result + bias.float()).to(output_dtype)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """``torch._scaled_grouped_mm`` of E4M3 codes in groups that end at ``offs``.

    Either the rows are in groups: [M, K] times [G, K, N] with scales [M] and [G, N] -> [M, N], NaN
    in rows after the last group. Or the contracted axis is: [N, M] times [M, K] with the scales of
    the groups one after another, [G * N] and [G * K] -> [G, N, K]. Raises ValueError for a bias,
    which CUTLASS does not add, and for ``scale_result``.
    """
    if bias is not None or scale_result is not None:
        raise ValueError("products of groups take no bias and no scale of the result")
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if b.ndim == 3:
        result = a.new_full((a.shape[0], b.shape[2]), torch.nan, dtype=out_dtype)
        for number, rows in enumerate(groups):
            part = a[rows].float() @ b[number].float()
            result[rows] = part * scale_a[rows, None].float() * scale_b[number].float()
        return result
    of_rows, of_columns = scale_a.reshape(len(ends), -1), scale_b.reshape(len(ends), -1)
    parts = [
        (a[:, rows].float() @ b[rows].float()) * left.float()[:, None] * right.float()
        for rows, left, right in zip(groups, of_rows, of_columns, strict=True)
    ]
    return torch.stack(parts).to(out_dtype)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """The values of packed E2M1 codes: two per byte, the first in the lower half."""
    packed = codes.contiguous().view(torch.uint8)
    both = torch.stack([packed & 15, packed >> 4], dim=-1)
    return _E2M1[both.flatten(-2).long()]


def _scaled(x: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """``x`` [rows, K] times the scale of each block of ``block`` elements of a row."""
    rows, blocks = x.shape[0], x.shape[1] // block
    of_blocks = untiled(scales, rows, blocks).float()
    return x * of_blocks.repeat_interleave(block, dim=1)


def untiled(scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Scales [rows, blocks] from tiles of 128 rows by 4 blocks, which store row r and block c at
    byte (r % 32) * 16 + (r // 32) * 4 + c; the padding of the last tiles is dropped."""
    down, across = -(-rows // 128), -(-blocks // 4)
    tiles = scales.reshape(-1)[: down * across * 512].reshape(down, across, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)[:rows, :blocks]
