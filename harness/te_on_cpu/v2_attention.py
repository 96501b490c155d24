"""The 2.x extension's functions for attention without fused kernels: softmaxes and rotations."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_on_cpu.refusal import refuse

_MASKED = -10000.0
_FP8_DTYPES = (7, 8)


def get_fused_attn_backend(extension: ModuleType, params: Any) -> tuple[Any, str]:
    """(no backend, why): the library falls back to attention made of GEMMs and a softmax.

    Real contract: ``pytorch/csrc/extensions/attention.cpp``. Raises UnsupportedByEmulation
    for attention in FP8, which has no other implementation.
    """
    return _no_backend(extension, params.qkv_dtype), "the CPU emulation has none"


def get_fused_attn_backend_of_arguments(
    extension: ModuleType, is_training: bool, q_dtype: Any, kv_dtype: Any, *_rest: Any
) -> Any:
    """The same without a reason, as it is until 2.19: the parameters one by one.

    Real contract: ``pytorch/csrc/extensions.h`` of 2.12 and 2.18, which agree in these three.
    """
    return _no_backend(extension, q_dtype)


def get_fused_attn_backend_without_training(
    extension: ModuleType, q_dtype: Any, kv_dtype: Any, *_rest: Any
) -> Any:
    """The same that is not told whether attention is trained, as it is until 2.4."""
    return _no_backend(extension, q_dtype)


def _no_backend(extension: ModuleType, dtype: Any) -> Any:
    if int(dtype) in _FP8_DTYPES:
        refuse("attention in FP8", "leave fp8_dpa and fp8_mha of the recipe off")
    return extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend


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


def scaled_softmax_backward_in_place(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """The same in the memory of ``output_grad``, as it is until 2.18.

    Real contract: ``pytorch/csrc/extensions/softmax.cpp`` of 2.18, "Produce gradients in place".
    It copies a gradient that is not contiguous.
    """
    given = scaled_softmax_backward(output_grad, softmax_results, scale_factor)
    return output_grad.detach().contiguous().copy_(given)


def _half(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"the fused softmax takes bf16 or fp16, got {tensor.dtype}")
    return tensor.detach()


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate pairs of features by ``freqs`` (s, 1, 1, d2), fp32 angles; features past d2 stay.

    Real contract (``common/fused_rope/fused_rope.cu``): fp32 inside, rounded to the input's type,
    (s, b, h, d) or (b, s, h, d). Raises UnsupportedByEmulation for packed sequences, start
    positions and context parallelism.
    """
    angles = _angles(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size)
    moved, rest = input.detach().float().split([angles.shape[-1], _rest(input, angles)], -1)
    turned = moved * angles.cos() + _partner(moved, interleaved) * angles.sin()
    return torch.cat((turned, rest), -1).to(input.dtype)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Gradient of ``fused_rope_forward``'s input: the transposed rotation."""
    angles = _angles(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size)
    moved, rest = (
        output_grads.detach().float().split([angles.shape[-1], _rest(output_grads, angles)], -1)
    )
    turned = moved * angles.cos() - _partner(moved * angles.sin(), interleaved)
    return torch.cat((turned, rest), -1).to(output_grads.dtype)


def fused_rope_backward_from_the_start(
    output_grads: Tensor, freqs: Tensor, *arguments: Any, **named: Any
) -> Tensor:
    """The same without start positions, as it is until 2.9."""
    return fused_rope_backward(output_grads, freqs, None, *arguments, **named)


def _angles(
    tensor: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    cu_seqlens: Tensor | None,
    cp_size: int,
) -> Tensor:
    """Angles that broadcast against ``tensor``: (s, 1, 1, d2) or (1, s, 1, d2)."""
    layout = qkv_format.name.removeprefix("NVTE_")
    if layout not in ("SBHD", "BSHD") or cu_seqlens is not None or cp_size != 1:
        refuse(f"rotary embeddings of packed or distributed sequences ({layout})")
    if start_positions is not None:
        refuse("rotary embeddings with start positions")
    length = tensor.shape[0 if layout == "SBHD" else 1]
    angles = freqs.detach()[:length].view(length, 1, 1, -1)
    return angles if layout == "SBHD" else angles.transpose(0, 1)


def _rest(tensor: Tensor, angles: Tensor) -> int:
    return tensor.shape[-1] - angles.shape[-1]


def _partner(moved: Tensor, interleaved: bool) -> Tensor:
    """The other feature of each pair, negated for the first of the two."""
    if interleaved:
        return torch.stack((-moved[..., 1::2], moved[..., ::2]), -1).flatten(-2)
    first, second = moved.chunk(2, -1)
    return torch.cat((-second, first), -1)
