"""Several quantisations or GEMMs in one call, for layers with many experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_on_cpu.refusal import refuse
from te_on_cpu.v2_gemm import bias_gradient, product, report, side
from te_on_cpu.v2_quantize import quantize
from te_on_cpu.v2_types import torch_dtype


def split_quantize(
    tensor: Tensor,
    split_sections: list[int],
    quantizer_list: list[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Each part of ``tensor`` along its first dimension, quantised by its own quantizer.

    Real contract (``pytorch/csrc/extensions/cast.cpp``): one quantizer per section; the sections
    may cover fewer rows than there are, and may be empty. The memory layout is not emulated: parts
    never share a buffer.
    """
    if len(quantizer_list) != len(split_sections):
        raise RuntimeError(
            f"{len(split_sections)} sections need as many quantizers, got {len(quantizer_list)}"
        )
    if sum(split_sections) > tensor.shape[0]:
        raise RuntimeError(f"sections {split_sections} exceed the {tensor.shape[0]} rows there are")
    source, start, parts = tensor.detach().contiguous(), 0, []
    for size, quantizer in zip(split_sections, quantizer_list, strict=True):
        parts.append(quantize(source[start : start + size], quantizer))
        start += size
    return parts


def fused_multi_quantize(
    input_list: list[Tensor], output_list: list[Any] | None, quantizer_list: list[Any], otype: Any
) -> list[Any]:
    """Each tensor quantised by its own quantizer, as it is until 2.4.

    Real contract: ``pytorch/csrc/extensions/transpose.cpp`` of 2.4. Raises UnsupportedByEmulation
    for outputs that exist.
    """
    if output_list is not None:
        refuse("several quantisations into tensors that exist")
    return [quantize(one, by) for one, by in zip(input_list, quantizer_list, strict=True)]


def te_general_grouped_gemm(
    A: list[Any],
    transA: bool,
    B: list[Any],
    transB: bool,
    D: list[Tensor] | None,
    D_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """``D[i] = op(B[i]) op(A[i]) + bias[i]``, in D's own memory; returns ``bias``.

    Real contract (``pytorch/csrc/extensions/gemm.cpp``): with ``single_output`` the results lie one
    after another in ``D[0]``. A bias without elements means no bias; with ``grad`` a bias with
    elements receives the column sums of B. If an operand is empty, the result is zero without a
    bias, or unchanged if accumulating.
    """
    if any(part.numel() for part in pre_gelu_out):
        refuse("GELU fused into a grouped GEMM")
    if D is None:
        refuse("a grouped GEMM that allocates its own output")
    rows = 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        left, right = side(b, turned=transB, name=f"B[{i}]"), side(a, turned=not transA, name="A")
        shape = (
            left.values.shape[1 if transB else 0],
            right.values.shape[0 if transA else 1],
        )
        out = D[0].view(-1, shape[1])[rows : rows + shape[0]] if single_output else D[i]
        rows += shape[0]
        if not left.values.numel() or not right.values.numel():
            _idle(out, bias[i], grad, accumulate)
            continue
        total = product(right, transA, left, transB, 1.0).view(shape)
        if grad and bias[i].numel():
            bias[i].copy_(bias_gradient(left, bias[i].dtype))
        elif bias[i].numel():
            total = total + bias[i].detach().float()
        total = total + out.float() if accumulate else total
        out.copy_(total.to(torch_dtype(D_type)))
        report(transA, transB, right, left, out)
    return bias


def _idle(out: Tensor, bias: Tensor, grad: bool, accumulate: bool) -> None:
    if not accumulate:
        out.zero_()
    if grad and bias.numel():
        bias.zero_()
