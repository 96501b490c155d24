"""Kernels of torchao that quantise, on data that bite: what they gave on an H200 is on record by
digest (``triton_on_cpu_h200.json``). To be imported once Triton is interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torchao.utils

# torchao defines the kernels of MX casts where it sees an MI350 or Blackwell
with (
    patch.object(torchao.utils, "is_ROCM", lambda: True),
    patch.object(torchao.utils, "is_MI350", lambda: True),
    patch.object(torchao.utils, "is_sm_at_least_100", lambda: False),
):
    from torchao.prototype.mx_formats import kernels as mx
from torchao.prototype.blockwise_fp8_training import kernels as blockwise
from torchao.prototype.moe_training.kernels import float8_rowwise as rowwise
from torchao.prototype.moe_training.kernels import jagged_float8_scales as jagged

E4M3 = torch.float8_e4m3fn
KINDS = ("wide", "bad")


def data(kind: str, *shape: int) -> torch.Tensor:
    """bf16: ``wide`` magnitudes of 2^-20 to 2^20; ``bad`` has NaN of both signs, infinities, a row
    of zeros and a row of NaN."""
    n, row = torch.Size(shape).numel(), shape[-1]
    make = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=make)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-20, 21, (n,), generator=make).float())
    x = x.bfloat16()
    if kind == "bad":
        nan, inf = float("nan"), float("inf")
        x[5], x[2 * row + 1], x[3 * row + 1], x[8 * row + 3] = nan, inf, -inf, -nan
        x[4 * row : 5 * row], x[6 * row : 7 * row] = 0.0, nan
    return x.view(*shape)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def kernels(x: torch.Tensor, several: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of a matrix and of three of them, by name."""
    columns = several.transpose(-2, -1).contiguous().transpose(-2, -1)
    for power in (True, False):
        how: Any = {"output_dtype": E4M3, "round_scales_to_power_of_2": power}
        of = f"p2={power}"
        yield (
            f"rowwise_2d {of}",
            lambda how=how: rowwise.triton_fp8_rowwise_2d_scale_and_cast(x, **how),
        )
        yield (
            f"colwise_3d {of}",
            lambda how=how: rowwise.triton_fp8_colwise_3d_scale_and_cast(several, **how),
        )
        yield (
            f"rowwise_3d_T {of}",
            lambda how=how: rowwise.triton_fp8_rowwise_3d_transpose_rhs(columns, **how),
        )
        yield (
            f"rowwise_3d_T_fused {of}",
            lambda how=how: rowwise.triton_fp8_rowwise_3d_transpose_rhs_fused_reduction(
                columns, **how
            ),
        )
        yield (
            f"jag_col {of}",
            lambda power=power: jagged.triton_fp8_per_group_colwise_scales(
                x, offsets(32, 96, 128), E4M3, power
            ),
        )
        yield (
            f"jag_dual {of}",
            lambda power=power: jagged.triton_fp8_per_group_colwise_scales_dual(
                x, x.flip(0).contiguous(), offsets(32, 32, 96, 128), E4M3, power
            ),
        )
    yield "bw_lhs", lambda: blockwise.triton_fp8_blockwise_act_quant_lhs(x)
    yield "bw_rhs", lambda: blockwise.triton_fp8_blockwise_act_quant_rhs(x)
    yield "bw_lhsT", lambda: blockwise.triton_fp8_blockwise_act_quant_transposed_lhs(x)
    yield "bw_w", lambda: blockwise.triton_fp8_blockwise_weight_quant_rhs(x)
    yield "bw_wT", lambda: blockwise.triton_fp8_blockwise_weight_quant_transposed_rhs(x)
    for mode, of in (("floor", "floor"), ("rceil", "rceil-rocm")):
        yield f"mx0 {of}", lambda mode=mode: mx.triton_to_mxfp8_dim0(x, 32, mode)
        yield f"mx1 {of}", lambda mode=mode: mx.triton_to_mxfp8_dim1(x, 32, mode)


def mx_results() -> Iterator[tuple[str, torch.Tensor]]:
    """Rows of 32 codes with scales of byte 0, eight of them, and of 2^0 to 2^7 of its bytes; and
    bytes of scales in tiles."""
    codes = torch.arange(7 * 32, 7 * 32 + 16 * 32).remainder(256).to(torch.uint8)
    rows = codes.view(16, 32).view(E4M3)
    scales = torch.tensor([[0]] * 8 + [[1 << n] for n in range(8)], dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        yield f"dequantised {dtype}", mx.triton_mxfp8_dequant_dim0(rows, scales, dtype)
    for size in ((128, 4), (5, 3), (130, 9), (256, 8)):
        of = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(size[0]))
        tiled = mx.triton_mx_block_rearrange(of.to(torch.uint8))
        yield f"rearranged {size[0]} x {size[1]}", tiled.view(torch.uint8)


def results() -> Iterator[tuple[str, torch.Tensor]]:
    """Codes and scales of each kernel, by its name, the data and their number."""
    for kind in KINDS:
        for name, run in kernels(data(kind, 128, 256), data(kind, 3, 128, 256)):
            first, *rest = name.split(" ")
            label = f"{first} {kind} {rest[0]}" if rest and "=" in rest[0] else f"{name} {kind}"
            for number, tensor in enumerate(run()):
                yield f"{label} {number}", tensor
