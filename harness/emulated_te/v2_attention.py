"""What attention without fused kernels needs of the 2.x extension: two softmaxes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_MASKED = -10000.0


def get_fused_attn_backend(extension: ModuleType, params: Any) -> tuple[Any, str]:
    """(no backend, why): the library falls back to attention made of GEMMs and a softmax.

    Real contract: ``pytorch/csrc/extensions/attention.cpp``.
    """
    return extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "the CPU emulation has none"


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Softmax over the last dimension of ``scale_factor * input``; (b, heads, queries, keys).

    Real contract (``common/fused_softmax/scaled_masked_softmax.cu``): fp32 inside, rounded to the
    input's type, bf16 or fp16.
    """
    return torch.softmax(_half(input).float() * scale_factor, -1).to(input.dtype)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """``scaled_softmax_forward`` where ``mask`` (1 or b, 1, queries, keys) is not 1.

    Real contract: masked scores are -10000, not minus infinity, and a row whose largest score is
    exactly that becomes all zeros.
    """
    scores = torch.where(mask.bool(), _MASKED, _half(input).float() * scale_factor)
    idle = scores.amax(-1, keepdim=True) == _MASKED
    return torch.where(idle, 0.0, torch.softmax(scores, -1)).to(input.dtype)


def scaled_softmax_backward(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """Gradient of the input of either softmax, from its rounded result.

    Real contract: ``scale * (g y - y sum(g y))`` in fp32, rounded to the gradient's type.
    """
    results = softmax_results.float()
    weighted = _half(output_grad).float() * results
    along = weighted.sum(-1, keepdim=True)
    return (scale_factor * (weighted - results * along)).to(output_grad.dtype)


def _half(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"the fused softmax takes bf16 or fp16, got {tensor.dtype}")
    return tensor.detach()
