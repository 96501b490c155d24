"""The functions of TransformerEngine 1.x's extension that Linear and LayerNormLinear call.

Arguments are those of transformer_engine/pytorch/csrc (extensions/*.cu and ts_fp8_op.cpp).
Addresses are kept: a scale, amax or inverse is a tensor and an offset in elements, and an empty
tensor is a null pointer. ``since`` is the installed version where kernels differ: from 1.11 on a
cast writes 1/scale as well, in 1.10 only the Python layer and the update do.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from harness.emulated_te import kernels
from harness.emulated_te.refusal import refuse
from harness.emulated_te.v1_names import FORMAT, TORCH_DTYPE, DType
from harness.emulated_te.watch import Cast, Multiply, Operand, Update, heard, tell

Version = tuple[int, int]
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def cell(tensor: Tensor, offset: int) -> Tensor | None:
    """The element ``offset`` behind the start of ``tensor``, shared; None if it is empty."""
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
    """What every casting kernel has in common: codes, amax, 1/scale. uint8, shape of ``values``."""
    if values.numel() == 0:
        return torch.empty(values.shape, dtype=torch.uint8)
    factor, largest = cell(scale, scale_offset), cell(amax, amax_offset)
    inverse = cell(scale_inv, scale_inv_offset)
    format = FORMAT[DType(otype)]
    codes = kernels.cast(values, factor, format, largest)
    applied = torch.ones(()) if factor is None else factor
    if inverse is not None and since >= (1, 11):
        inverse.copy_(torch.reciprocal(applied))
    if heard():
        tell(Cast(values, codes, applied.clone(), largest, format))
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
    """Codes [m, n] and their transpose into given buffers; nothing at all where noop[0] is 1."""
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
    """Gradient of the bias (from the input as it is, not from its codes), codes, transpose."""
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
    """Codes [m, n] -> ``output`` [n, m], nothing where noop[0] is 1."""
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
    if heard():
        tell(Update(tuple(histories), tuple(scales)))
    kernels.update_amax_and_scale(
        reduced,
        histories,
        scales,
        scale_invs,
        algorithm=algorithm,
        format=FORMAT[DType(fp8_dtype)],
        margin=margin,
    )


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

    An fp8 D stores the maximum of this product in ``d_amax``, not a running one. Raises NotCarried
    for a fused GELU. Source: extensions/gemm.cu, common/gemm/cublaslt_gemm.cu.
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
    if heard():
        layout: Literal["TN", "NN", "NT"] = "TN" if transa else "NT" if transb else "NN"
        tell(Multiply(layout, left, right, d))


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
        amax.zero_()
    d.copy_(kernels.cast(result, scale, format, amax))
    if heard():
        applied = torch.ones(()) if scale is None else scale.clone()
        tell(Cast(result, d, applied, amax, format))


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
