"""The arithmetic of TransformerEngine's CUDA kernels, in torch on the CPU.

Every function names the kernel whose contract it follows. FP8 codes, maxima and scales have the
same bits as on a GPU. Sums do not: GEMMs and norms add in fp32, in an order that differs between
the two, so they can only be compared by a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Format = Literal["e4m3", "e5m2"]

#: Torch's dtype of each format: its bytes are the bytes the kernels write.
DTYPE: dict[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Largest finite value of each format.
LARGEST: dict[Format, float] = {"e4m3": 448.0, "e5m2": 57344.0}
#: The code that the hardware's conversion writes for any NaN, of either sign, in both formats.
NAN_CODE = 0x7F
_FP32_MAX = torch.finfo(torch.float32).max


def keep_largest(cell: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ``cell`` (one fp32 element) to max|values|; NaNs among the values do not count.

    Kernels reduce with ``fmaxf``, which drops NaN, and store with an atomic integer maximum over
    the bits (``atomicMaxFloat``, common/utils.cuh): a cell that holds NaN keeps it.
    """
    if values.numel() == 0:
        return
    largest = torch.nan_to_num(values.float().abs(), nan=0.0, posinf=torch.inf).amax()
    bits = torch.maximum(cell.view(torch.int32), largest.view(torch.int32))
    cell.copy_(bits.view(torch.float32).reshape(cell.shape))


def cast(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    format: Format,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """``values * scale`` in fp32, rounded to nearest even, saturated: uint8 codes, same shape.

    ``amax``, if given, is raised to max|values| before scaling; without a scale it is 1. Infinity
    saturates, NaN becomes 0x7F (``cvt.rn.satfinite``). Source: ``unary_kernel``,
    common/util/vectorized_pointwise.h, and ``cast_transpose_general_kernel``,
    common/transpose/cast_transpose.cu.
    """
    exact = values.detach().float()
    if amax is not None:
        keep_largest(amax, exact)
    scaled = exact if scale is None else exact * scale
    largest = LARGEST[format]
    codes = scaled.clamp(-largest, largest).to(DTYPE[format]).view(torch.uint8)
    return codes.masked_fill_(scaled.isnan(), NAN_CODE)


def dequantise(
    codes: torch.Tensor, scale_inv: torch.Tensor | None, format: Format, dtype: torch.dtype
) -> torch.Tensor:
    """uint8 codes times ``scale_inv`` in fp32, rounded to ``dtype``.

    Source: ``dequantize_func``, common/util/cast.cu.
    """
    values = codes.view(DTYPE[format]).float()
    return (values if scale_inv is None else values * scale_inv).to(dtype)


def update_amax_and_scale(
    reduced: torch.Tensor | None,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    scale_invs: Sequence[torch.Tensor] | None,
    *,
    algorithm: str,
    format: Format,
    margin: float,
) -> None:
    """Roll every history [length, n] and derive its scales [n], in place.

    ``reduced`` is the concatenation of all rows 0 after the reduction over ranks; where it is 0,
    row 0 itself counts. A slot whose newest amax is 0 is neither rolled nor rescaled. ``max`` uses
    the maximum of the whole history ignoring NaN, ``most_recent`` the newest value. A scale is
    unchanged unless that amax is finite and > 0; one that overflows becomes the largest fp32.
    ``scale_invs`` exist in 1.x only. Source: ``kernel_bulk``, common/recipe/delayed_scaling.cu.

    Raises RuntimeError for another algorithm, for histories of different lengths, and for scales
    that do not belong to their history.
    """
    if algorithm not in ("max", "most_recent"):
        raise RuntimeError(f"Amax algorithm {algorithm!r} is neither 'max' nor 'most_recent'.")
    if len({history.shape[0] for history in histories}) > 1:
        lengths = [history.shape[0] for history in histories]
        raise RuntimeError(f"Amax histories of one update differ in length: {lengths}.")
    for history, scale in zip(histories, scales, strict=True):
        if scale.numel() != history.shape[1]:
            raise RuntimeError(f"Expected {history.shape[1]} elements, found {scale.numel()}.")
    target = torch.tensor(LARGEST[format] * 2.0**-margin, dtype=torch.float32)
    start = 0
    for index, (history, scale) in enumerate(zip(histories, scales, strict=True)):
        newest = history[0].clone()
        if reduced is not None:
            part = reduced[start : start + newest.numel()]
            newest = torch.where(part != 0, part, newest)
        start += newest.numel()
        amax = _roll(history, newest, algorithm)
        derived = torch.where(torch.isfinite(amax) & (amax > 0), target / amax, scale)
        scale.copy_(torch.where(derived.isinf(), _FP32_MAX, derived))
        if scale_invs is not None:
            scale_invs[index].copy_(torch.reciprocal(scale))


def _roll(history: torch.Tensor, newest: torch.Tensor, algorithm: str) -> torch.Tensor:
    """Roll the slots whose newest amax is not 0. Returns the amaxes [n] from which the scales are
    derived (0: the scale is unchanged)."""
    rolled = torch.cat([history[1:], newest[None]])
    if algorithm == "most_recent":
        amax = newest
    else:
        amax = torch.nan_to_num(rolled, nan=0.0, posinf=torch.inf).amax(0)
    ran = newest != 0
    # Row 0 is cleared for the next step, even if it is the only row.
    rolled[0] = 0
    history.copy_(torch.where(ran, rolled, history))
    return torch.where(ran, amax, 0.0)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    transa: bool,
    transb: bool,
    scale: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """D = op(b) @ op(a) in fp32, row-major [n, m]; ``a`` and ``b`` are fp32 matrices.

    op(a) is a.T with ``transa``, op(b) is b.T with ``transb``: cuBLAS letters TN, NN, NT.
    ``scale`` (1/scale of a times that of b) multiplies the accumulated sum, as the epilogue does;
    in float64, so that no order of the two factors overflows. Then the ``addend`` (the previous
    contents of D, to accumulate) and the bias [m] are added in fp32. The caller rounds to D's
    dtype.
    fp32 inputs are rounded to TF32 on a GPU and FP8 sums are kept in fewer bits with fast
    accumulation; neither is imitated. Source: common/gemm/cublaslt_gemm.cu.
    """
    sums = (b.T if transb else b) @ (a.T if transa else a)
    if scale is not None:
        sums = (sums.double() * scale).float()
    if addend is not None:
        sums = sums + addend.float()
    return sums if bias is None else sums + bias.float()


def column_sums(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum over rows in fp32, rounded to ``dtype``: the gradient of a bias.

    Source: ``reduce_dbias``, common/transpose/cast_transpose_fusion.cu, and the BGRADB epilogue.
    """
    return matrix.detach().sum(0, dtype=torch.float32).to(dtype)
