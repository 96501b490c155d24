"""Models that consist of products of groups of rows, as experts have them, or of the casts and the
moves of rows around these. Scripts build them from this source."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from narrowfuzz.play.groups import (
    fp8_blockwise_grouped,
    fp8_cast,
    fp8_grouped,
    grouped,
    mx_scales_moved,
    mxfp8_dequantised,
    mxfp8_grouped,
    permuted_to_experts,
    prepare_triton_if_interpreted,
)


class GroupedProducts(nn.Module):
    """Rows in groups, each multiplied by matrices of its own to twice the width and back, as
    experts are. The sizes of groups cycle through ``sizes`` until no row remains, and the last
    group gets the rest; ``behind`` more rows belong to no group, and hold NaN."""

    def __init__(self, dim: int, experts: int, sizes: tuple[int, ...], behind: int) -> None:
        super().__init__()
        self.experts, self.sizes, self.behind = experts, sizes, behind
        #: Kernels take rows of whole 16 bytes.
        self.padding = -dim % 8
        width = dim + self.padding
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.pad(x.reshape(-1, x.shape[-1]), (0, self.padding))
        offs = group_ends(self.experts, self.sizes, len(rows), x.device)
        unused = rows.new_full((self.behind, rows.shape[1]), float("nan"))
        hidden = grouped(torch.cat([rows, unused]), self.up.transpose(1, 2), offs)
        y = grouped(hidden, self.down, offs)
        return y[: len(rows), : x.shape[-1]].reshape(x.shape)


class QuantisedGroups(nn.Module):
    """The same by torchao's products of this ``kind``, with its options (``how``). Widths are
    padded with zeros to multiples of ``block``. So are rows, unless torchao pads each group; this
    padding is in the last group if all ``sizes`` are such multiples, else in none. Without
    ``sizes`` no group has a row, as on a rank that got no token, and the input is returned."""

    def __init__(
        self, dim: int, experts: int, sizes: tuple[int, ...], block: int, kind: str, *how: Any
    ) -> None:
        super().__init__()
        if kind != "mxfp8":
            prepare_triton_if_interpreted()
        # a watch replaces functions that are imported before the model runs
        from importlib.util import find_spec

        import torchao.prototype.moe_training

        if kind == "fp8_blockwise" and find_spec("triton") is not None:
            import torchao.prototype.moe_training.blockwise_fp8.grouped_mm  # noqa: F401

        self.experts, self.sizes, self.kind, self.how = experts, sizes, kind, how
        pads = kind != "fp8" and how[-1]
        self.padding = 1 if pads else block
        width = dim - dim % -block
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width))
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        given = flat if self.sizes else flat[:0]
        rows = F.pad(given, (0, self.up.shape[2] - x.shape[-1], 0, -len(given) % self.padding))
        whole = all(size % self.padding == 0 for size in self.sizes)
        offs = group_ends(self.experts, self.sizes, len(rows if whole else given), x.device)
        hidden = self.multiply(rows, self.up.transpose(1, 2), offs)
        y = self.multiply(hidden[: len(given)], self.down.transpose(1, 2), offs)
        y = y[: len(given), : x.shape[-1]]
        return (y if self.sizes else torch.cat([flat, y])).reshape(x.shape)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        padded = F.pad(a, (0, 0, 0, -len(a) % self.padding)).contiguous()  # row-major, for torchao
        if a.dtype == torch.float64:
            return grouped(padded, b, offs)
        given = padded, b, offs, None
        if self.kind == "mxfp8":
            (output,) = mxfp8_grouped(*given, *self.how)
        elif self.kind == "fp8":
            (output,) = fp8_grouped(*given)
        else:
            (output,) = fp8_blockwise_grouped(*given, *self.how)
        return output.to(a.dtype)


class GroupCasts(nn.Module):
    """Features times a weight, and beside that the FP8 cast of the result by a kernel of torchao's
    experts: three times as wide, and repeated to fill groups of all ``sizes``, which are groups of
    columns if ``across``."""

    def __init__(self, dim: int, kernel: str, sizes: tuple[int, ...], across: bool) -> None:
        super().__init__()
        prepare_triton_if_interpreted()
        self.kernel, self.sizes, self.across = kernel, sizes, across
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        if y.dtype != torch.float64:
            rows = y.detach().reshape(-1, y.shape[-1])
            wide = rows.repeat(-(-sum(self.sizes) // len(rows)), 3)[: sum(self.sizes)]
            ends = torch.tensor(self.sizes, device=x.device).cumsum(0)
            fp8_cast(self.kernel, wide.t().contiguous() if self.across else wide, ends, True)
        return y


class MxScales(nn.Module):
    """Features times a weight, and beside that torchao's kernels which move MX scales, on the
    exponent bytes of the result in groups of ``sizes`` rows or columns, and the kernel that
    dequantises E4M3 codes with such scales."""

    def __init__(self, dim: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        prepare_triton_if_interpreted()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        if y.dtype != torch.float64:
            rows = y.detach().reshape(-1, y.shape[-1]).float().contiguous()  # as casts return it
            exponents = (rows.view(torch.int32) >> 23) & 255
            wide = exponents.repeat(-(-sum(self.sizes) // len(rows)), 1)[: sum(self.sizes)]
            ends = torch.tensor(self.sizes, device=x.device).cumsum(0)
            of = "triton_mx_block_rearrange"
            mx_scales_moved(of, wide, None)
            mx_scales_moved(f"{of}_per_group_3d", wide.expand(3, *wide.shape).contiguous(), None)
            mx_scales_moved(f"{of}_2d_M_groups", wide, ends)
            mx_scales_moved(f"{of}_2d_K_groups", wide.t().contiguous(), ends)
            codes = F.pad(rows.clamp(-448.0, 448.0), (0, -rows.shape[1] % 32))
            scales = exponents[:, :1].expand(-1, codes.shape[1] // 32).contiguous()
            mxfp8_dequantised(codes, scales, str(x.dtype).removeprefix("torch."))
        return y


class Beside(torch.autograd.Function):
    """The first of two tensors; both get its gradient."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, grad


class PermutedRows(nn.Module):
    """Features times a weight. Their gradient is the sum of itself and of what torchao makes of it
    when it moves rows back from experts, by its ``triton`` kernel or by torch. ``ranks`` ranks send
    rows to ``experts`` experts, in groups whose sizes cycle through ``sizes``."""

    def __init__(
        self, dim: int, ranks: int, experts: int, sizes: tuple[int, ...], triton: bool
    ) -> None:
        super().__init__()
        prepare_triton_if_interpreted()
        self.of, self.sizes, self.triton = (ranks, experts), sizes, triton
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.weight).reshape(-1, x.shape[-1])
        moved = y
        if y.dtype != torch.float64:
            ends = group_ends(self.of[0] * self.of[1], self.sizes, len(y), x.device)
            counts = ends.diff(prepend=ends.new_zeros(1)).reshape(self.of)
            moved = permuted_to_experts(y, counts, self.triton)
        return Beside.apply(y, moved).reshape(x.shape)


def group_ends(
    experts: int, sizes: tuple[int, ...], rows: int, device: torch.device
) -> torch.Tensor:
    """The end of each group: sizes cycle through ``sizes``, and the last has all other rows."""
    ends = [0]
    for number in range(experts - 1):
        ends.append(min(rows, ends[-1] + sizes[number % len(sizes)] if sizes else 0))
    return torch.tensor([*ends[1:], rows], dtype=torch.int32, device=device)
