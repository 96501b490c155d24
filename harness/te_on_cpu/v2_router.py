"""The router of mixtures of experts in the 2.x extension: which experts each token goes to, with
which weight, and the auxiliary loss that balances them.

Inputs are read as fp32, everything is computed in fp32, and results are rounded once
(``pytorch/router.py``, "Precision Notes"). The sums that warps make in a tree are torch's here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: A divisor that is 0 becomes this (``common/fused_router/utils.h``, ``epsilon``).
_EPSILON = 1e-20
#: Above it, softplus(x) is x (``sqrtsoftplus_scalar`` there).
_LINEAR = 20.0
#: From so many chosen experts on, radix selection runs (``get_radix_topk_threshold`` there), also
#: within groups and among them.
_RADIX = 16
_WARP = 32


def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights in the logits' dtype, map of the chosen experts or ``topk_indices``, fp32 values for
    the backward); 0 weight for experts that are not chosen.

    Real contract: ``common/fused_router/fused_topk_with_score_function.cu``,
    ``fused_topk_forward_simple_kernel``; ``pytorch/csrc/extensions/router.cpp`` for the checks.
    """
    _check(logits, topk, score_function)
    if expert_bias is not None and score_function == "softmax":
        raise RuntimeError(
            "score_function must be sigmoid or sqrtsoftplus when expert_bias is not None"
        )
    if expert_bias is not None and expert_bias.dtype != torch.float32:
        raise RuntimeError("expert_bias must be a float32 tensor")
    if topk_indices is not None and routing_map_format:
        raise RuntimeError(
            "topk_indices output cannot be combined with non-default routing_map_format"
        )
    x = logits.float().reshape(-1, logits.shape[-1])
    early = use_pre_softmax and score_function == "softmax"
    scores = (
        _softmax(x) if early else x if score_function == "softmax" else _SCORES[score_function](x)
    )
    biased = scores if expert_bias is None else scores + expert_bias
    radix = topk >= _RADIX
    chosen = (
        _of_groups(biased, topk, num_groups or 0, group_topk or 0, radix)
        if (group_topk or 0) > 0
        else _topk(biased, topk, radix)
    )
    taken = biased.gather(1, chosen)
    if expert_bias is not None:
        taken = taken - expert_bias[chosen]
    held = {"sigmoid": scores, "sqrtsoftplus": x, "softmax": scores}[score_function]
    if score_function != "softmax":
        taken = taken / (taken.sum(1, keepdim=True) + _EPSILON) if topk > 1 else taken
    elif not early:
        taken = _softmax(taken)
        held = torch.full_like(x, -torch.inf).scatter(1, chosen, taken)
    factor = 1.0 if scaling_factor is None else scaling_factor
    weights = torch.zeros_like(x).scatter(1, chosen, factor * taken)
    if topk_indices is not None:
        topk_indices.copy_(chosen.reshape(topk_indices.shape))
        mapped = topk_indices
    else:
        mapped = _mapped(chosen, logits, routing_map_format)
    return weights.to(logits.dtype).reshape(logits.shape), mapped, held.reshape(logits.shape)


def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool,
    routing_map_format: int,
) -> None:
    """Write the gradient of the logits into ``grad_logits``.

    Real contract: ``common/fused_router/fused_topk_with_score_function.cu``,
    ``fused_topk_with_score_function_backward_kernel``.
    """
    experts = grad_probs.shape[-1]
    held = intermediate_output.reshape(-1, experts)
    grad = grad_probs.float().reshape(-1, experts) * (
        1.0 if scaling_factor is None else scaling_factor
    )
    if use_dense_indices:
        routed = torch.zeros_like(held, dtype=torch.bool)
        routed = routed.scatter(1, routing_map.reshape(-1, topk).long(), True)
    else:
        routed = _unmapped(routing_map, experts, routing_map_format)
    grad = torch.where(routed, grad, 0.0)
    if score_function == "softmax":
        values = held if use_pre_softmax else torch.where(routed, held, 0.0)
        given = values * (grad - (values * grad).sum(1, keepdim=True))
    else:
        if topk > 1:
            values = _value(held, score_function)
            grad = torch.where(routed, _of_shares(grad, values, routed), 0.0)
        given = grad * _slope(held, score_function)
    grad_logits.copy_(given.reshape(grad_logits.shape))


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(scores of all experts that add up to 1, fp32; map of the chosen experts; fp32 values for the
    backward).

    Real contract: ``common/fused_router/fused_score_for_moe_aux_loss.cu``.
    """
    _check(logits, topk, score_function)
    x = logits.float().reshape(-1, logits.shape[-1])
    if score_function == "softmax":
        held = scores = _softmax(x)
    else:
        held = values = _SCORES[score_function](x)
        scores = values / (values.sum(1, keepdim=True) + _EPSILON)
        held = x if score_function == "sqrtsoftplus" else held
    mapped = _mapped(_topk(scores, topk, topk >= _RADIX), logits, routing_map_format)
    return scores.reshape(logits.shape), mapped, held.reshape(logits.shape)


def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: Tensor,
    grad_scores: Tensor,
    grad_logits: Tensor,
    topk: int,
    score_function: str,
) -> None:
    """Write the gradient of the logits into ``grad_logits``. Real contract: as of its forward."""
    experts = grad_scores.shape[-1]
    held, grad = intermediate_output.reshape(-1, experts), grad_scores.reshape(-1, experts)
    if score_function == "softmax":
        given = held * (grad - (held * grad).sum(1, keepdim=True))
    else:
        values = _value(held, score_function)
        every = torch.ones_like(held, dtype=torch.bool)
        given = _of_shares(grad, values, every) * _slope(held, score_function)
    grad_logits.copy_(given.reshape(grad_logits.shape))


def fused_moe_aux_loss_fwd(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """(loss, a number in the dtype of ``probs``; [its coefficient, its fp32 value]): the
    coefficient times the sum over experts of their tokens times their probabilities.

    Real contract: ``common/fused_router/fused_moe_aux_loss.cu``. The number of columns is a
    multiple of the number of experts, where several sequences have a loss of their own.
    """
    if min(topk, total_num_tokens, num_experts) <= 0:
        raise RuntimeError("topk, total_num_tokens and num_experts must be greater than 0")
    if num_cols % num_experts:
        raise RuntimeError(
            f"Number of input columns ({num_cols}) must be a multiple of number of experts "
            f"({num_experts})."
        )
    return _aux_loss(probs, tokens_per_expert, float(total_num_tokens), num_experts, topk, coeff)


def fused_moe_aux_loss_fwd_graph_safe(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """The same, with the number of tokens in a tensor."""
    if total_num_tokens.numel() != 1 or total_num_tokens.dtype != torch.int64:
        raise RuntimeError("total_num_tokens must be int64 and contain exactly one element")
    return _aux_loss(probs, tokens_per_expert, float(total_num_tokens), num_experts, topk, coeff)


def fused_moe_aux_loss_bwd(
    Const_buf: Tensor,
    tokens_per_expert: Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: Tensor,
) -> Tensor:
    """The gradient of the probabilities (num_rows, num_cols), in the dtype of the loss: the same in
    each row. Real contract: as of its forward."""
    row = Const_buf[0] * tokens_per_expert.float() * grad_aux_loss.float()
    return row.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()


def _aux_loss(
    probs: Tensor, tokens: Tensor, total: float, experts: int, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    single = torch.tensor(coeff, dtype=torch.float32)
    factor = experts * single / topk / total / total
    value = (probs.float().sum(0) * tokens.float()).sum() * factor
    return value.to(probs.dtype), torch.stack((factor, value))


def _check(logits: Tensor, topk: int, score_function: str) -> None:
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError(f"Unsupported router probs dtype {logits.dtype}")
    if not logits.is_contiguous():
        raise RuntimeError("logits must be contiguous")
    if not logits.numel():
        raise RuntimeError("num_tokens and num_experts must be greater than 0")
    if not 0 < topk <= logits.shape[-1]:
        raise RuntimeError(
            f"topk must be in [1, num_experts], got topk={topk} num_experts={logits.shape[-1]}"
        )
    if score_function not in ("softmax", *_SCORES):
        raise RuntimeError(
            "score_function must be softmax, sigmoid or sqrtsoftplus for router fusion"
        )


def _softmax(x: Tensor) -> Tensor:
    exps = torch.exp(x - x.amax(1, keepdim=True))
    return exps * (1.0 / exps.sum(1, keepdim=True))


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def _sqrtsoftplus(x: Tensor) -> Tensor:
    return torch.where(x > _LINEAR, x, torch.log1p(torch.exp(x))).sqrt()


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": _sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


def _value(held: Tensor, score_function: str) -> Tensor:
    """The scores, from what the forward keeps: the scores, or the logits of sqrtsoftplus."""
    return _sqrtsoftplus(held) if score_function == "sqrtsoftplus" else held


def _slope(held: Tensor, score_function: str) -> Tensor:
    """The derivative of the score function, from what the forward keeps."""
    if score_function == "sigmoid":
        return held * (1.0 - held)
    inner = torch.where(held > _LINEAR, 1.0, _sigmoid(held))
    return inner / (2.0 * _sqrtsoftplus(held) + _EPSILON)


def _of_shares(grad: Tensor, values: Tensor, routed: Tensor) -> Tensor:
    """The gradient of values, from that of their shares in the sum of the routed ones."""
    own = torch.where(routed, values, 0.0)
    total = own.sum(1, keepdim=True) + _EPSILON
    return grad / total - (grad * own).sum(1, keepdim=True) / (total * total)


def _topk(scores: Tensor, k: int, radix: bool) -> Tensor:
    """The columns of the ``k`` largest scores of each row. Of equal ones radix selection takes the
    first; the other kernel takes the winner of a tree over the lanes of a warp, whose lane 0 keeps
    its own on a tie: lanes count in the order of their reversed bits
    (``naive_topk_and_mask_smallk``). NaN and -Inf come last here. The kernels may choose the same
    column twice where a row has fewer than ``k`` other scores, and some prefer NaN to a number."""
    columns = torch.arange(scores.shape[1])
    if not radix:
        lane = columns % _WARP
        reversed_bits = sum((lane >> bit & 1) << (4 - bit) for bit in range(5))
        columns = columns[torch.argsort(reversed_bits * scores.shape[1] + columns)]
    plain = scores[:, columns].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = plain.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return columns[order]


def _of_groups(scores: Tensor, topk: int, groups: int, group_topk: int, radix: bool) -> Tensor:
    """The ``topk`` largest scores among those in the ``group_topk`` groups of experts whose own
    largest ones add up to most."""
    experts = scores.shape[1]
    if topk % group_topk:
        raise RuntimeError(
            f"topk must be divisible by group_topk, got topk={topk} group_topk={group_topk}"
        )
    if groups < group_topk:
        raise RuntimeError(
            f"group_topk must be <= num_groups, got group_topk={group_topk} num_groups={groups}"
        )
    if experts % groups:
        raise RuntimeError(
            f"num_experts must be divisible by num_groups, got num_experts={experts} "
            f"num_groups={groups}"
        )
    each = topk // group_topk
    if each > experts // groups:
        raise RuntimeError(
            f"per-group topk must be <= group size, got per_group_topk={each} "
            f"group_size={experts // groups}"
        )
    rows = scores.reshape(len(scores), groups, -1)
    flat = rows.reshape(-1, rows.shape[2])
    best = flat.gather(1, _topk(flat, each, radix)).sum(1).reshape(-1, groups)
    among = _topk(best, group_topk, radix)
    inside = torch.zeros_like(best, dtype=torch.bool).scatter(1, among, True)
    masked = torch.where(inside[..., None], rows, -torch.inf)
    return _topk(masked.reshape(scores.shape), topk, radix)


def _mapped(chosen: Tensor, logits: Tensor, routing_map_format: int) -> Tensor:
    """The map of the chosen experts: a bool each, or (format 1) a bit, the lowest first."""
    experts = logits.shape[-1]
    found = torch.zeros((len(chosen), experts), dtype=torch.bool).scatter(1, chosen, True)
    if not routing_map_format:
        return found.reshape(logits.shape)
    padded = torch.nn.functional.pad(found, (0, -experts % 8)).reshape(len(chosen), -1, 8)
    packed = (padded.int() << torch.arange(8, dtype=torch.int32)).sum(-1).to(torch.uint8)
    return packed.reshape(*logits.shape[:-1], -1)


def _unmapped(mapped: Tensor, experts: int, routing_map_format: int) -> Tensor:
    if not routing_map_format:
        return mapped.reshape(-1, experts).bool()
    rows = mapped.reshape(-1, mapped.shape[-1]).int()
    bits = rows[..., None] >> torch.arange(8, dtype=torch.int32) & 1
    return bits.reshape(len(rows), -1)[:, :experts].bool()
