"""The GEMM of TransformerEngine 1.x's extension: extensions/gemm.cu, gemm/cublaslt_gemm.cu."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from te_on_cpu import kernels
from te_on_cpu.refusal import refuse
from te_on_cpu.v1 import Version, cell
from te_on_cpu.v1_names import FORMAT, DType
from te_on_cpu.watch import Cast, Multiply, Operand, has_listeners, notify

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def te_gemm(
    a: Tensor,
    a_scale_inverse: Tensor,
    a_type: int,
    transa: bool,
    b: Tensor,
    b_scale_inverse: Tensor,
    b_type: int,
    transb: bool,
    d: Tensor,
    d_scale: Tensor,
    d_type: int,
    d_amax: Tensor,
    bias: Tensor,
    _bias_type: int,
    pre_gelu_out: Tensor,
    grad: bool,
    _workspace: Tensor,
    _workspace_size: int,
    accumulate: bool,
    _use_split_accumulator: bool,
    _sm_count: int = 0,
    *,
    since: Version,
) -> None:
    """D = op(b) @ op(a) into ``d``, in d's dtype or fp8, with bias or the bias gradient of b.

    An fp8 D stores the maximum of this product in ``d_amax``, not a running one. Raises
    UnsupportedByEmulation for a fused GELU.
    """
    if pre_gelu_out.numel():
        refuse("te_gemm with a fused GELU")
    if a.numel() == 0 or b.numel() == 0:
        _empty_gemm(b, d, bias, grad, accumulate, since)
        return
    left, right = _operand(a, a_scale_inverse, a_type), _operand(b, b_scale_inverse, b_type)
    _check_layout(left, right, transa, transb, grad and bias.numel() > 0)
    inverses = [o.scale_inv.double() for o in (left, right) if o.scale_inv is not None]
    result = kernels.matmul(
        _values(left),
        _values(right),
        transa=transa,
        transb=transb,
        scale=inverses[0] * inverses[1] if inverses else None,
        addend=d if accumulate else None,
        bias=bias if bias.numel() and not grad else None,
    )
    if bias.numel() and grad:
        bias.copy_(kernels.column_sums(b, bias.dtype))
    _store(result, d, cell(d_scale, 0), cell(d_amax, 0), d_type)
    if has_listeners():
        layout: Literal["TN", "NN", "NT"] = "TN" if transa else "NT" if transb else "NN"
        notify(Multiply(layout, left, right, d))


def _operand(matrix: Tensor, scale_inverse: Tensor, type: int) -> Operand:
    format = FORMAT.get(DType(type))
    if format is None:
        return Operand(matrix, None, _NAMES[matrix.dtype])
    inverse = cell(scale_inverse, 0)
    if inverse is None:
        raise RuntimeError("An FP8 operand of a GEMM came without the inverse of its scale.")
    return Operand(matrix, inverse, format)


def _values(operand: Operand) -> Tensor:
    if operand.scale_inv is None:
        return operand.data.detach().float()
    format = cast(kernels.Format, operand.format)
    return kernels.dequantise(operand.data, None, format, torch.float32)


def _check_layout(
    left: Operand, right: Operand, transa: bool, transb: bool, with_bias_gradient: bool
) -> None:
    narrow = [operand.scale_inv is not None for operand in (left, right)]
    if any(narrow) and not (all(narrow) and transa and not transb):
        raise RuntimeError("An FP8 GEMM takes two FP8 operands, in layout TN: cuBLAS has no other.")
    if transa and transb:
        raise RuntimeError("A GEMM in layout TT does not exist.")
    if with_bias_gradient and not transb:
        refuse("te_gemm with a bias gradient in a layout other than NT")


def _store(
    result: Tensor, d: Tensor, scale: Tensor | None, amax: Tensor | None, d_type: int
) -> None:
    format = FORMAT.get(DType(d_type))
    if format is None:
        d.copy_(result)
        return
    if amax is not None:
        # cuBLAS stores the maximum of this D, unlike casting kernels, which store a running one.
        amax.zero_()
    d.copy_(kernels.cast(result, scale, format, amax))
    if has_listeners():
        applied = torch.ones(()) if scale is None else scale.clone()
        notify(Cast(result, d, applied, amax, format))


def _empty_gemm(
    b: Tensor, d: Tensor, bias: Tensor, grad: bool, accumulate: bool, since: Version
) -> None:
    """No kernel runs: D is zero. Before 1.12 the bias is cleared as well, even a parameter."""
    if d.numel() and not accumulate:
        d.zero_()
    if bias.numel() and since < (1, 12):
        bias.zero_()
    elif bias.numel() and grad:
        bias.copy_(kernels.column_sums(b, bias.dtype))
