"""LayerNorm and RMSNorm as TransformerEngine's kernels compute them: fp32 throughout.

Inputs are matrices [rows, columns]; statistics are fp32 [rows]. A forward returns its output in
fp32, not yet rounded: an fp8 kernel takes the amax of, and scales, that value. Sources:
common/layer_norm/ln_*_kernels.cuh and common/rmsnorm/rmsnorm_*_kernels.cuh.
"""

from __future__ import annotations

import torch

from te_on_cpu.kernels import column_sums


def layernorm_forward(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output fp32 [rows, columns], mean [rows], 1/sqrt(variance + eps) [rows])."""
    values = x.detach().float()
    mean = values.mean(1)
    centred = values - mean[:, None]
    rsigma = torch.rsqrt(centred.square().mean(1) + eps)
    output = _gain(gamma, zero_centered) * (rsigma[:, None] * centred) + beta.detach().float()
    return output, mean, rsigma


def layernorm_backward(
    dz: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, gamma and beta: the first in x's dtype, the others in gamma's."""
    normed = rsigma[:, None] * (x.detach().float() - mean[:, None])
    upstream = dz.detach().float()
    dy = _gain(gamma, zero_centered) * upstream
    along = (dy * normed).mean(1, keepdim=True)
    dx = rsigma[:, None] * (dy - (along * normed + dy.mean(1, keepdim=True)))
    dgamma, dbeta = column_sums(upstream * normed, gamma.dtype), column_sums(dz, gamma.dtype)
    return dx.to(x.dtype), dgamma, dbeta


def rmsnorm_forward(
    x: torch.Tensor, gamma: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output fp32 [rows, columns], 1/sqrt(mean square + eps) [rows])."""
    values = x.detach().float()
    rsigma = torch.rsqrt(values.square().mean(1) + eps)
    return _gain(gamma, zero_centered) * (rsigma[:, None] * values), rsigma


def rmsnorm_backward(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and gamma, each in its own tensor's dtype."""
    normed = rsigma[:, None] * x.detach().float()
    upstream = dz.detach().float()
    dy = _gain(gamma, zero_centered) * upstream
    dx = rsigma[:, None] * (dy - (dy * normed).mean(1, keepdim=True) * normed)
    return dx.to(x.dtype), column_sums(upstream * normed, gamma.dtype)


def _gain(gamma: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """gamma in fp32. With ``zero_centered``, gamma is stored minus 1."""
    gain = gamma.detach().float()
    return gain + 1 if zero_centered else gain
