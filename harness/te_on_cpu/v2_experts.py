"""Movement of tokens to experts and back by an index map, in the 2.x extension.

The kernels compute in the dtype of the rows: weights are rounded to it, and so are products and
sums (``common/permutation/permutation.cu``, ``TCompute``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_on_cpu.refusal import refuse
from te_on_cpu.v2_types import torch_dtype

#: A place that nothing goes to, and a token that is dropped.
_NONE = -1
#: Threads move this many bytes at once.
_ACCESS = 16


def moe_permute_fwd(
    input: Tensor,
    dtype: Any,
    indices: Tensor,
    num_out_tokens: int,
    workspace: list[Tensor],
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(rows ordered by expert (num_out_tokens, columns); where the row of each choice and token is,
    (topk * tokens), -1 if it is dropped; the workspace).

    Real contract: ``pytorch/csrc/extensions/permutation.cpp``, ``moe_permute_fwd``;
    ``common/permutation/permutation.cu``, ``moe_permute_row_map`` and ``moe_permute_kernel``.
    Choices are sorted by expert as unsigned numbers, stably. Rows that nothing is written to are
    NaN here and hold anything there.
    """
    _whole(input, dtype)
    tokens, topk = indices.shape
    total = num_out_tokens if num_out_tokens > 0 else tokens * topk
    order = (indices.reshape(-1).long() & 0xFFFFFFFF).sort(stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    places = torch.where(places < total, places, _NONE)
    output = torch.full((total, input.shape[1]), torch.nan, dtype=input.dtype)
    goes = order[:total]
    output[: len(goes)] = input[goes // topk]
    return output, places.reshape(tokens, topk).t().reshape(-1).int(), workspace or [order]


def moe_unpermute_fwd(
    input: Tensor,
    dtype: Any,
    row_id_map: Tensor,
    prob: Tensor,
    num_tokens: int,
    topK: int,
) -> Tensor:
    """The rows of each token added up (num_tokens, columns), weighted if ``prob`` (num_tokens,
    topk) is not empty.

    Real contract: ``common/permutation/permutation.cu``, ``moe_unpermute_kernel``.
    """
    _whole(input, dtype)
    total = torch.zeros((num_tokens, input.shape[1]), dtype=input.dtype)
    for choice, places in enumerate(row_id_map.reshape(topK, num_tokens).long()):
        rows = input[places.clamp_min(0)]
        if prob.numel():
            rows = rows * prob[:, choice, None].to(input.dtype)
        rows = torch.where((places != _NONE)[:, None], rows, 0.0)
        total = total + rows if choice else rows
    return total


def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of the rows, gradient of the weights in fp32 (tokens, topk)): each row's is its
    token's, weighted; each weight's is the sum of products of its token's gradient and its row.

    Real contract: ``common/permutation/permutation.cu``, ``moe_permute_kernel``. Without weights
    the kernel looks at one choice per token. The gradient of a dropped choice's weight is 0.
    """
    _whole(input_bwd, dtype)
    weighted = bool(prob.numel())
    tokens, topk = prob.shape if weighted else (len(row_id_map), 1)
    rows = torch.full((len(input_fwd), input_bwd.shape[1]), torch.nan, dtype=input_bwd.dtype)
    of_prob = torch.zeros if weighted else torch.empty
    grads = of_prob((tokens, topk), dtype=torch.float32)
    for choice, places in enumerate(row_id_map.reshape(topk, tokens).long()):
        there = places != _NONE
        at, grad = places[there], input_bwd[there]
        if weighted:
            rows[at] = grad * prob[there, choice, None].to(grad.dtype)
            grads[there, choice] = (grad * input_fwd[at].to(grad.dtype)).float().sum(1)
        else:
            rows[at] = grad
    return rows, grads


def _whole(rows: Tensor, dtype: Any) -> None:
    """Refuse FP8 rows, and rows that are no multiple of the 16 bytes that threads move at once:
    the kernels have no guard for these and would touch the next row."""
    if torch_dtype(dtype).itemsize == 1:
        refuse("moe_permute of FP8 rows", "permute before quantising")
    if rows.shape[1] * rows.element_size() % _ACCESS:
        refuse(f"moe_permute of rows of {rows.shape[1]} numbers", "use rows of whole 16 bytes")
