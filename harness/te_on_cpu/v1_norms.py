"""The norms of TransformerEngine 1.x's extension. Arguments: extensions/normalization.cu.

An fp8 forward quantises the fp32 output before any other rounding. Before 1.11 it does not write
1/scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_on_cpu import norms
from te_on_cpu.v1 import Version, quantise


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[output in the input's dtype, mean, 1/sigma]."""
    out = torch.empty_like(input)
    return layernorm_fwd_noalloc(input, weight, bias, out, eps, sm_margin, zero_centered_gamma)


def layernorm_fwd_noalloc(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ln_out: Tensor,
    eps: float,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """The same, output into ``ln_out``."""
    output, mean, rsigma = norms.layernorm_forward(input, weight, bias, eps, zero_centered_gamma)
    return [ln_out.copy_(output), mean, rsigma]


def layernorm_fwd_inf(*arguments: Any) -> Tensor:
    """Only the output of ``layernorm_fwd``."""
    return layernorm_fwd(*arguments)[0]


def layernorm_fwd_fp8(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: Tensor, *rest: Any, **at: Any
) -> list[Tensor]:
    """(input, weight, bias, eps, scale, amax, ...) -> [codes, mean, 1/sigma]."""
    out = torch.empty(input.shape, dtype=torch.uint8)
    return layernorm_fwd_fp8_noalloc(input, weight, bias, eps, scale, out, *rest, **at)


def layernorm_fwd_fp8_noalloc(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    scale: Tensor,
    ln_out: Tensor,
    amax: Tensor,
    scale_inv: Tensor,
    otype: int,
    _sm_margin: int,
    zero_centered_gamma: bool,
    *,
    since: Version,
    **offsets: int,
) -> list[Tensor]:
    """The same, codes into ``ln_out``."""
    output, mean, rsigma = norms.layernorm_forward(input, weight, bias, eps, zero_centered_gamma)
    codes = quantise(output, scale, amax, scale_inv, otype, since=since, **offsets)
    return [ln_out.copy_(codes), mean, rsigma]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[gradient of x, of gamma, of beta]."""
    return list(norms.layernorm_backward(dz, x, mu, rsigma, gamma, zero_centered_gamma))


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[output in the input's dtype, 1/rms]."""
    out = torch.empty_like(input)
    return rmsnorm_fwd_noalloc(input, weight, out, eps, sm_margin, zero_centered_gamma)


def rmsnorm_fwd_noalloc(
    input: Tensor,
    weight: Tensor,
    ln_out: Tensor,
    eps: float,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """The same, output into ``ln_out``."""
    output, rsigma = norms.rmsnorm_forward(input, weight, eps, zero_centered_gamma)
    return [ln_out.copy_(output), rsigma]


def rmsnorm_fwd_inf(*arguments: Any) -> Tensor:
    """Only the output of ``rmsnorm_fwd``."""
    return rmsnorm_fwd(*arguments)[0]


def rmsnorm_fwd_fp8(
    input: Tensor, weight: Tensor, eps: float, scale: Tensor, *rest: Any, **at: Any
) -> list[Tensor]:
    """(input, weight, eps, scale, amax, ...) -> [codes, 1/rms]."""
    out = torch.empty(input.shape, dtype=torch.uint8)
    return rmsnorm_fwd_fp8_noalloc(input, weight, eps, scale, out, *rest, **at)


def rmsnorm_fwd_fp8_noalloc(
    input: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    ln_out: Tensor,
    amax: Tensor,
    scale_inv: Tensor,
    otype: int,
    _sm_margin: int,
    zero_centered_gamma: bool,
    *,
    since: Version,
    **offsets: int,
) -> list[Tensor]:
    """The same, codes into ``ln_out``."""
    output, rsigma = norms.rmsnorm_forward(input, weight, eps, zero_centered_gamma)
    codes = quantise(output, scale, amax, scale_inv, otype, since=since, **offsets)
    return [ln_out.copy_(codes), rsigma]


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """[gradient of x, of gamma]."""
    return list(norms.rmsnorm_backward(dz, x, rsigma, gamma, zero_centered_gamma))


PLAIN = (
    layernorm_bwd,
    layernorm_fwd,
    layernorm_fwd_inf,
    layernorm_fwd_noalloc,
    rmsnorm_bwd,
    rmsnorm_fwd,
    rmsnorm_fwd_inf,
    rmsnorm_fwd_noalloc,
)
#: The functions that quantise; they differ between versions.
VERSIONED = (
    layernorm_fwd_fp8,
    layernorm_fwd_fp8_noalloc,
    rmsnorm_fwd_fp8,
    rmsnorm_fwd_fp8_noalloc,
)
