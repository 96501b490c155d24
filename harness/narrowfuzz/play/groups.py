"""Grouped matrix products, as models and scripts call them: torch's, and torchao's in MXFP8 and
FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Rows, [M, K] in groups that end at ``offs`` or [G, M, K], times their group's matrix of [G,
    K, N]. Float64, which torch's kernel lacks, runs group by group, with zeros behind the last."""
    if a.dtype != torch.float64:
        return torch._grouped_mm(a, b, offs=offs)
    if offs is None:
        return a @ b
    ends = offs.tolist()
    parts = [a[i:j] @ m for i, j, m in zip([0, *ends], ends, b, strict=False)]
    return torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[-1])])


def mxfp8_grouped(
    rows: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor,
    grad_output: torch.Tensor | None,
    mode: str,
    wgrad_with_hp: bool,
    padded: bool,
) -> tuple[torch.Tensor, ...]:
    """Rows, [M, K] in groups that end at ``offs``, times their group's matrix of [G, K, N],
    emulated; with a ``grad_output``, the gradients of both as well. ``padded``: each group is
    padded to whole blocks."""
    from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    how = {"pad_token_groups_for_grouped_mm": True} if padded else {}  # older releases cannot

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(
            a,
            b,
            offs=offs.int(),
            kernel_preference=KernelPreference.EMULATED,
            wgrad_with_hp=wgrad_with_hp,
            scale_calculation_mode=ScaleCalculationMode(mode),
            **how,
        )

    return with_gradients(product, rows, weights, grad_output)


def fp8_grouped(
    rows: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor,
    grad_output: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Rows, [M, K] in groups that end at ``offs``, times their group's matrix of [G, K, N],
    rowwise; with a ``grad_output``, both gradients as well. On a CPU in Triton's interpreter."""
    prepare_triton(rows)
    from torchao.prototype.moe_training import fp8_grouped_mm

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm(
            a, b, offs=offs.int(), pad_token_groups_for_grouped_mm=False
        )

    return with_gradients(product, rows, in_columns(weights), grad_output)


def fp8_blockwise_grouped(
    rows: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor,
    grad_output: torch.Tensor | None,
    padded: bool,
) -> tuple[torch.Tensor, ...]:
    """The same in blocks of 128, emulated; ``padded``: each group is padded to whole blocks."""
    prepare_triton(rows)
    from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return grouped_mm._to_fp8_blockwise_then_scaled_grouped_mm(
            a, b, offs=offs.int(), pad_token_groups_for_grouped_mm=padded
        )

    return with_gradients(product, rows, in_columns(weights), grad_output)


def in_columns(weights: torch.Tensor) -> torch.Tensor:
    """The same values in column-major memory layout."""
    return weights.transpose(1, 2).contiguous().transpose(1, 2)


def with_gradients(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    weights: torch.Tensor,
    grad_output: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The product and, with a ``grad_output``, the gradients of both operands."""
    if grad_output is None:
        return (product(rows, weights),)
    leaves = [t.detach().requires_grad_() for t in (rows, weights)]
    output = product(*leaves)
    output.backward(grad_output.to(output.dtype))
    return (output.detach(), *(t.grad for t in leaves if t.grad is not None))


def fp8_cast(
    kernel: str, x: torch.Tensor, offs: torch.Tensor | None, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as fp32 numbers, and scales, one row per group, by a cast kernel of torchao's experts;
    a kernel that takes two tensors ("dual") gets this one twice."""
    prepare_triton(x)
    import torchao.prototype.moe_training.kernels  # noqa: F401

    twice = (x, x) if kernel.endswith("dual") else (x,)
    groups = () if offs is None else (offs.int(),)
    cast = getattr(torch.ops.torchao, kernel)
    codes, scales = cast(*twice, *groups, torch.float8_e4m3fn, power_of_two)[:2]
    return codes.float(), scales if offs is None else scales.reshape(len(offs), -1)


def mx_scales_moved(kernel: str, scales: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """MX scale bytes, as numbers, in the layout that tensor cores read, by a torchao kernel."""
    prepare_triton(scales)
    import torchao.prototype.moe_training.kernels.mxfp8.quant  # noqa: F401

    groups = () if offs is None else (offs.int(),)
    moved = getattr(torch.ops.torchao, kernel)(scales.to(torch.uint8), *groups)
    return moved.view(torch.uint8).float()


def permuted_rows(
    counts: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    experts: int,
    ranks: int,
    n: int,
) -> torch.Tensor:
    """For each row of each expert, the number of the row it comes from, by torchao's kernel: for
    each rank ``counts`` rows, from ``starts`` on; ``offsets`` is where each expert's rows begin."""
    prepare_triton(counts)
    import torchao.prototype.moe_training.ep.kernels  # noqa: F401

    fill = torch.ops.torchao._fill_indices_wrapper
    return fill(counts.int(), starts.int(), offsets.int(), experts, ranks, n).float()


def permuted_rows_gradient(
    grad_output: torch.Tensor, numbers: torch.Tensor, rows: int
) -> torch.Tensor:
    """The gradients of ``rows`` rows, by torchao's kernel: row numbers[i] gets grad_output[i]."""
    prepare_triton(grad_output)
    import torchao.prototype.moe_training.ep.permute  # noqa: F401

    back = torch.ops.torchao._triton_permute_bwd
    return back(grad_output.contiguous(), numbers.int(), rows, grad_output.shape[1])


class InMxfp8(torch.autograd.Function):
    """Casts rows to MXFP8 as torchao's exchange of rows does; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> Any:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx

        scales, codes = to_mx(rows, torch.float8_e4m3fn, 32)
        return MXTensor.from_qdata_and_scales(codes, scales, rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad


class OutOfMxfp8(torch.autograd.Function):
    """The values of an MXFP8 tensor; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, rows: Any) -> Any:
        return rows.dequantize(rows.orig_dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad


def permuted_to_experts(rows: torch.Tensor, counts: torch.Tensor, triton: bool) -> torch.Tensor:
    """Rows by rank and expert, ``counts`` of each, permuted to experts in MXFP8, in whole blocks of
    32, and back; the gradient is permuted by torchao's Triton kernel, or by torch."""
    prepare_triton(rows)
    from torchao.prototype.moe_training.ep.permute import permute_mxfp8_fwd_hp_bwd

    ranks, experts = counts.shape
    wide = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 32)).contiguous()
    given = counts.flatten(), ranks, experts, 32
    _, moved, numbers, *_ = permute_mxfp8_fwd_hp_bwd(
        InMxfp8.apply(wide), *given, use_triton_for_bwd=triton
    )
    values = OutOfMxfp8.apply(moved)
    # padding has the index -1, here that of an additional last row
    places = numbers.long() % (len(rows) + 1)
    back = values.new_zeros(len(rows) + 1, values.shape[1]).index_copy(0, places, values)
    return back[:-1, : rows.shape[1]]


def mxfp8_dequantised(codes: torch.Tensor, scales: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values of E4M3 codes (given as numbers) with a scale byte per 32, by torchao's kernel."""
    prepare_triton(codes)
    from torchao.prototype.mx_formats import kernels

    e4m3 = codes.to(torch.float8_e4m3fn)
    bytes_ = scales.to(torch.uint8)
    return kernels.triton_mxfp8_dequant_dim0(e4m3, bytes_, getattr(torch, dtype))


def prepare_triton(like: torch.Tensor) -> None:
    """Make torchao's Triton kernels run on this tensor's device, before torchao is imported. For
    autotuned kernels the shape selects one configuration: timing all takes a GPU a minute. On a CPU
    the interpreter does that itself, but for blockwise kernels, which get the last one: others have
    programs of two rows and take thirty times as long."""
    if not like.is_cuda:
        import triton_on_cpu

        triton_on_cpu.install_torchao()
    from torchao.prototype.blockwise_fp8_training import kernels
    from torchao.prototype.moe_training.kernels import float8_rowwise, jagged_float8_scales

    for module in (kernels, float8_rowwise, jagged_float8_scales) if like.is_cuda else (kernels,):
        for kernel in vars(module).values():
            if hasattr(kernel, "configs"):
                kernel.every = getattr(kernel, "every", kernel.configs)
                chosen = sum(like.shape) % len(kernel.every) if like.is_cuda else -1
                kernel.configs = [kernel.every[chosen]]


def prepare_triton_if_interpreted() -> None:
    """The same for callers that build a model and may not run it, in a process whose kernels are
    interpreted: on a machine with a GPU, too, parameters are made on a CPU and on "meta"."""
    import os

    if os.environ.get("TRITON_INTERPRET") == "1":
        prepare_triton(torch.empty(0, device="cpu"))
