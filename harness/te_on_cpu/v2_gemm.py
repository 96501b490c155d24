"""The matrix multiplications of the 2.x extension.

cuBLAS is column-major and TransformerEngine names its arguments after it; in row-major terms
``D = op(B) @ op(A)``. TN is the output (A weight, B input), NN the input gradient (A weight, B
output gradient), NT the weight gradient (A input, B output gradient).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from te_on_cpu.kernels import cast, column_sums, dequantise, matmul
from te_on_cpu.refusal import refuse
from te_on_cpu.v2_activation import gelu as gelu_value
from te_on_cpu.v2_activation import gelu_slope
from te_on_cpu.v2_fp4 import operand_of, product_scale
from te_on_cpu.v2_quantize import fp8_block_scales, mx_scales, write
from te_on_cpu.v2_releases import (
    PRODUCTS_ARE_QUANTISED_AFTERWARDS,
    TRANSPOSES_MULTIPLY_ANYWHERE,
    installed_release,
)
from te_on_cpu.v2_scales import fp8_block_spread, mx_unit, spread
from te_on_cpu.v2_tensors import empty, logical_shape
from te_on_cpu.v2_types import (
    flat_shape,
    fp8_format,
    is_blockwise,
    is_float8,
    is_mxfp8,
    is_nvfp4,
    is_quantised,
    keeps_transposes,
    kind,
    torch_dtype,
)
from te_on_cpu.watch import Cast, Multiply, Operand, has_listeners, notify

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


@dataclass(frozen=True)
class Side:
    """An operand, resolved to the data that the multiplication reads."""

    #: fp32 (rows, columns) of the logical tensor, before any transposition.
    values: Tensor
    #: 1/scale to apply to the product: one element, or None if ``values`` includes it.
    scale_inv: Tensor | None
    seen: Operand
    shape: torch.Size
    #: Of NVFP4 the largest magnitude of the tensor, one fp32 element, in whose units values are.
    amax: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The operand's own dtype; RuntimeError for FP8, in which no product is stored."""
        if self.seen.scale_inv is not None:
            raise RuntimeError("a GEMM on quantised operands needs an output_dtype, got None")
        return self.seen.data.dtype


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """``D = alpha op(B) op(A) + beta D + bias``; [D, bias gradient, GELU's input, None].

    Real contract (``pytorch/csrc/extensions/gemm.cpp``, ``common/gemm/cublaslt_gemm.cu``):
    products of the codes accumulate in fp32, both 1/scales apply to the sum, then bias, then one
    rounding to D's type. A quantised D with per-tensor inputs and delayed scaling is cast from the
    fp32 sum and *sets* amax; any other quantised D is rounded to ``output_dtype`` first. With
    ``grad`` and a bias the column sums of B come back and nothing is added. ``gelu`` applies to
    the fp32 sum, and the sum rounded (to ``bias_type`` if operands are quantised, else to D's type)
    comes back; with ``grad`` the sum is multiplied with the slope at ``gelu_in``.

    Emulated with torch's fp32 product on the CPU: another order of summation, no fast accumulation
    (``use_split_accumulator`` changes nothing), and fp32 operands multiply as fp32, not as TF32.
    Raises RuntimeError for operands that cuBLAS does not support, and UnsupportedByEmulation for
    communication overlap.
    """
    if (
        comm_overlap is not None
        or comm_type is not None
        or extra_output is not None
        or bulk_overlap
    ):
        refuse("communication overlapped with GEMMs", "leave the ub_* options off")
    if gelu and grad and bias is not None:
        refuse("a GEMM with both the slope of GELU and a bias gradient")
    a, b = side(A, turned=not transA, name="A"), side(B, turned=transB, name="B")
    _check_alike(a, b, A, B)
    dtype = a.dtype if output_dtype is None else torch_dtype(output_dtype)
    bias_grad = None
    if grad and bias is not None:
        bias_grad, bias = bias_gradient(b, dtype), None
    total = product(a, transA, b, transB, alpha)
    if total.numel() and not a.values.numel():
        total = total.zero_()  # nothing is launched: neither scales, which may be unset, nor bias
    elif bias is not None:
        total = total + bias.detach().float()
    gelu_input = None
    if gelu:
        total, gelu_input = _gelu(total, gelu_in, grad, _gelu_dtype(A, B, bias_type, dtype))
    result = _finish(
        total, D, quantizer, dtype, beta if accumulate else 0.0, is_float8(A) or is_float8(B)
    )
    report(transA, transB, a, b, result)
    return [result, bias_grad, None if grad else gelu_input, None]


def _gelu(
    total: Tensor, gelu_in: Tensor | None, grad: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """GELU of the sum and the sum itself; or the sum times GELU's slope at ``gelu_in``."""
    if not grad:
        return gelu_value(total), total.to(dtype)
    if gelu_in is None:
        raise RuntimeError("the slope of GELU in a GEMM needs the activation's input, got None")
    return total * gelu_slope(gelu_in.detach().float()).view(total.shape), gelu_in


def _gelu_dtype(A: Any, B: Any, bias_type: Any, dtype: torch.dtype) -> torch.dtype:
    quantised = any(map(is_quantised, (A, B)))
    return torch_dtype(bias_type) if quantised else dtype


def side(tensor: Any, *, turned: bool, name: str) -> Side:
    """The data of an operand that a multiplication reads.

    :param turned: column-wise data is needed, as the operand is contracted along its rows.

    Real contract (``CanonicalizeGemmInput`` in ``common/gemm/cublaslt_gemm.cu``): block-scaled data
    is read row-wise or column-wise as needed. Per-tensor data on a device that stores transposes is
    read from the transpose if ``turned``; on others from whichever copy exists (until 2.9 row-wise
    data only). RuntimeError if the copy is missing, or its rows are no multiple of 16 bytes.
    """
    if is_mxfp8(tensor):
        return _mx_side(tensor, "columnwise" if turned else "rowwise", name)
    if is_blockwise(tensor):
        return _block_side(tensor, "columnwise" if turned else "rowwise", name)
    if is_nvfp4(tensor):
        values, amax, seen = operand_of(tensor, "columnwise" if turned else "rowwise", name)
        return Side(values, None, seen, logical_shape(tensor), amax)
    if is_float8(tensor):
        return _float8_side(tensor, turned, name)
    if not isinstance(tensor, Tensor) or tensor.dtype not in _NAMES:
        refuse(f"a GEMM on {type(tensor).__name__}")
    matrix = tensor.detach().reshape(flat_shape(tensor.shape))
    return Side(matrix.float(), None, Operand(matrix, None, _NAMES[tensor.dtype]), tensor.shape)


def _float8_side(tensor: Any, turned: bool, name: str) -> Side:
    fmt, shape = fp8_format(tensor._fp8_dtype), logical_shape(tensor)
    transpose = None if tensor._transpose_invalid else tensor._transpose
    anywhere = installed_release() >= TRANSPOSES_MULTIPLY_ANYWHERE
    from_transpose = turned if keeps_transposes() else tensor._data is None and anywhere
    buffer = transpose if from_transpose else tensor._data
    if buffer is None:
        missing = "column-wise data (its transpose)" if from_transpose else "row-wise data"
        raise RuntimeError(f"operand {name} of the FP8 GEMM lacks {missing}")
    codes = buffer.view(flat_shape(shape)[:: -1 if from_transpose else 1])
    if codes.shape[1] % 16:
        raise RuntimeError(
            f"operand {name} of the FP8 GEMM has rows of {codes.shape[1]} bytes; "
            "pad to a multiple of 16"
        )
    values = dequantise(codes, None, fmt, torch.float32)
    if from_transpose:
        codes, values = codes.t(), values.t()
    return Side(values, tensor._scale_inv, Operand(codes, tensor._scale_inv, fmt), shape)


def _mx_side(tensor: Any, direction: Literal["rowwise", "columnwise"], name: str) -> Side:
    data = getattr(tensor, f"_{direction}_data")
    if data is None:
        raise RuntimeError(f"operand {name} of the MXFP8 GEMM lacks {direction} data")
    fmt = fp8_format(tensor._fp8_dtype)
    codes, scales = data.view(flat_shape(data.shape)), mx_scales(tensor, direction)
    units = spread(mx_unit(scales), 1 if direction == "rowwise" else 0)
    values = dequantise(codes, units, fmt, torch.float32)
    return Side(values, None, Operand(codes, scales, fmt), data.shape)


def _block_side(tensor: Any, direction: Literal["rowwise", "columnwise"], name: str) -> Side:
    """An operand of FP8 block scaling: codes whose contracted dimension comes last, so column-wise
    ones are transposed (``CanonicalizeGemmInput``)."""
    data = getattr(tensor, f"_{direction}_data")
    if data is None:
        raise RuntimeError(f"operand {name} of the FP8 block scaling GEMM lacks {direction} data")
    fmt, shape = fp8_format(tensor._fp8_dtype), logical_shape(tensor)
    rows, columns = flat_shape(shape)
    contracted, outer = (columns, rows) if direction == "rowwise" else (rows, columns)
    if contracted % 16 or outer % 8:
        raise RuntimeError(
            f"operand {name} of the FP8 block scaling GEMM is {rows} x {columns}: pad the "
            "contracted dimension to a multiple of 16, and the other one to a multiple of 8"
        )
    codes = data.view(rows, columns) if direction == "rowwise" else data.view(columns, rows).t()
    scales, block = fp8_block_scales(tensor, direction)
    units = fp8_block_spread(scales, block, (rows, columns))
    values = dequantise(codes, units, fmt, torch.float32)
    return Side(values, None, Operand(codes, scales, fmt), shape)


def _check_alike(a: Side, b: Side, A: Any, B: Any) -> None:
    if a.seen.format == b.seen.format == "e5m2":
        raise RuntimeError("cuBLAS has no GEMM of E5M2 with E5M2; make one operand E4M3")
    if any(of_kind(A) != of_kind(B) for of_kind in (is_mxfp8, is_float8, is_blockwise, is_nvfp4)):
        raise RuntimeError(
            f"the GEMM cannot multiply {type(A).__name__} with {type(B).__name__}: "
            "quantise both with the same kind of scaling"
        )
    if is_blockwise(A) and A._is_2D_scaled and B._is_2D_scaled:
        raise RuntimeError("cuBLAS has no GEMM of two operands with blocks of 128 x 128")


def product(a: Side, trans_a: bool, b: Side, trans_b: bool, alpha: float) -> Tensor:
    """``alpha op(B) op(A)`` in fp32, shaped like B without its last dimension (flat if turned)."""
    columns, rows = b.values.shape[0 if trans_b else 1], a.values.shape[1 if trans_a else 0]
    if columns != rows:
        raise RuntimeError(f"the GEMM cannot contract {columns} columns of B with {rows} rows of A")
    scale = None
    if a.amax is not None and b.amax is not None:
        scale = product_scale(a.amax, b.amax, alpha).double()
    elif a.scale_inv is not None and b.scale_inv is not None:
        scale = a.scale_inv.double() * b.scale_inv.double() * alpha
    elif alpha != 1.0:
        scale = torch.tensor(alpha, dtype=torch.float64)
    total = matmul(a.values, b.values, transa=trans_a, transb=trans_b, scale=scale)
    return total if trans_b else total.view(*b.shape[:-1], total.shape[1])


def bias_gradient(b: Side, dtype: torch.dtype) -> Tensor:
    """Column sums of operand B. Raises UnsupportedByEmulation if it is quantised, which cuBLAS has
    no epilogue for."""
    if b.seen.scale_inv is not None:
        refuse("a bias gradient from a GEMM on quantised operands")
    return column_sums(b.values, dtype)


def _finish(
    total: Tensor, D: Any, quantizer: Any, dtype: torch.dtype, beta: float | None, per_tensor: bool
) -> Any:
    if quantizer is None:
        return _into(total, D, dtype, 1.0 if beta is None else beta)
    if beta != 0.0:
        refuse("accumulation into a quantised GEMM output")
    written = kind(quantizer) == "delayed" and per_tensor
    if not written and installed_release() < PRODUCTS_ARE_QUANTISED_AFTERWARDS:
        _refuse_result(quantizer, per_tensor)
    target = empty(quantizer, total.shape, dtype) if D is None else D
    if written:
        _cast_sum(total, quantizer, target)
    else:
        write(total.to(dtype), quantizer, target)
    return target


def _refuse_result(quantizer: Any, per_tensor: bool) -> NoReturn:
    """Until 2.7 cuBLAS writes every quantised result, which it can do for FP8 operands only; by
    current scaling it would use a scale that is left from an earlier cast."""
    if per_tensor:
        refuse(f"a GEMM whose result is written by a {type(quantizer).__name__} in this release")
    raise RuntimeError("cuBLAS has no GEMM of these operands with a quantised result")


def _into(total: Tensor, D: Any, dtype: torch.dtype, beta: float) -> Tensor:
    if D is None:
        return total.to(dtype)
    if D.shape != total.shape:
        raise RuntimeError(
            f"the GEMM's output has shape {tuple(D.shape)}, its product {tuple(total.shape)}"
        )
    if not isinstance(D, Tensor) or type(D) not in (Tensor, torch.nn.Parameter):
        refuse(f"a GEMM into an existing {type(D).__name__}")
    D.detach().copy_(total + beta * D.detach().float() if beta else total)
    return D


def _cast_sum(total: Tensor, quantizer: Any, target: Any) -> None:
    """Store codes and 1/scale, and overwrite amax as cuBLAS does: it is no running maximum."""
    fmt, scale = fp8_format(quantizer.dtype), quantizer.scale.detach().reshape(1)
    amax = quantizer.amax.detach()
    codes = cast(total, scale, fmt, amax.zero_())
    target._data.copy_(codes)
    target._scale_inv.copy_(scale.reciprocal())
    if has_listeners():
        notify(Cast(total, codes, scale.clone(), amax, fmt))


def report(trans_a: bool, trans_b: bool, a: Side, b: Side, result: Any) -> None:
    """Report a GEMM to the listeners."""
    if has_listeners():
        layout = ("T" if trans_a else "N") + ("T" if trans_b else "N")
        notify(Multiply(layout, a.seen, b.seen, result))  # type: ignore[arg-type]
