"""The normalisations of the 2.x extension."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from te_on_cpu import norms
from te_on_cpu.refusal import refuse
from te_on_cpu.v2_output import rounded_or_quantised
from te_on_cpu.v2_releases import NORMS_FIND_AMAX, NORMS_ROUND_BEFORE_AMAX, installed_release
from te_on_cpu.v2_types import flat_shape, torch_dtype


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[output in the input's shape, mean (rows,), 1/sqrt(variance + eps) (rows,)], statistics fp32.

    Real contract: ``pytorch/csrc/extensions/normalization.cpp``,
    ``common/normalization/layernorm/ln_fwd_kernels.cuh``.
    """
    if bias is None:
        raise RuntimeError("layernorm_fwd needs a bias")
    _own_kernels()
    rows = input.view(flat_shape(input.shape))
    output, mean, rsigma = norms.layernorm_forward(rows, weight, bias, eps, zero_centered_gamma)
    return [_finished(output.view(input.shape), otype, quantizer, ln_out), mean, rsigma]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Gradients of x, gamma and beta: the first in x's dtype, the others in gamma's.

    Real contract: ``common/normalization/layernorm/ln_bwd_kernels.cuh``.
    """
    flat = flat_shape(x.shape)
    dx, dgamma, dbeta = norms.layernorm_backward(
        dz.reshape(flat), x.reshape(flat), mu, rsigma, gamma, zero_centered_gamma
    )
    return [dx.view(x.shape), dgamma, dbeta]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[output in the input's shape, None, 1/sqrt(mean square + eps) (rows,) fp32].

    Real contract: ``common/normalization/rmsnorm/rmsnorm_fwd_kernels.cuh``.
    """
    _own_kernels()
    rows = input.view(flat_shape(input.shape))
    output, rsigma = norms.rmsnorm_forward(rows, weight, eps, zero_centered_gamma)
    return [_finished(output.view(input.shape), otype, quantizer, ln_out), None, rsigma]


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Gradients of x and gamma, each in its own tensor's dtype.

    Real contract: ``common/normalization/rmsnorm/rmsnorm_bwd_kernels.cuh``.
    """
    flat = flat_shape(x.shape)
    dx, dgamma = norms.rmsnorm_backward(
        dz.reshape(flat), x.reshape(flat), rsigma, gamma, zero_centered_gamma
    )
    return [dx.view(x.shape), dgamma]


def _finished(values: Tensor, otype: Any, quantizer: Any, ln_out: Any) -> Any:
    before = NORMS_FIND_AMAX <= installed_release() < NORMS_ROUND_BEFORE_AMAX
    dtype = torch_dtype(otype)
    return rounded_or_quantised(values, dtype, quantizer, ln_out, amax_of_unrounded=before)


def _own_kernels() -> None:
    """Refuse cuDNN's norms, which round at other places than TransformerEngine's."""
    if os.environ.get("NVTE_NORM_FWD_USE_CUDNN", "0") != "0":
        refuse("norms by cuDNN", "unset NVTE_NORM_FWD_USE_CUDNN")
