"""Faults in TransformerEngine's router of experts and in its movement of tokens, and legal rewrites
of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from narrowfuzz.models.te_experts import TE_EXPERTS
from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant

_ROUTED = "router:tex.fused_topk_with_score_function_fwd"
_ROUTED_BACK = "router:tex.fused_topk_with_score_function_bwd"
_SCORED, _SCORED_BACK = (f"router:tex.fused_score_for_moe_aux_loss_{way}" for way in ("fwd", "bwd"))
_LOSS, _LOSS_BACK = (f"router:tex.fused_moe_aux_loss_{way}" for way in ("fwd", "bwd"))
_SENT = "permutation:tex.moe_permute_fwd"
_SENT_BACK = "permutation:tex.moe_permute_bwd"
_RETURNED = "permutation:tex.moe_unpermute_fwd"
_RETURNED_BACK = "permutation:tex.moe_unpermute_bwd"
_INDEX = tuple(model.name for model in TE_EXPERTS if not model.interpreted)


def _keeps_bias(route: Any, logits: Any, *how: Any) -> Any:
    probs, chosen, held = route(logits, *how)
    bias = how[6]
    if bias is None:
        return probs, chosen, held
    values = torch.where(chosen, held + bias, 0.0)
    shares = values / values.sum(-1, keepdim=True)
    return (shares * (how[4] or 1.0)).to(probs.dtype), chosen, held


def _first_32(route: Any, logits: Any, *how: Any) -> Any:
    """Experts from the 33rd on are out of the reach of a warp that has 32 lanes."""
    near = logits.clone()
    if how[0] <= 32 and not how[3]:
        near[:, 32:] = torch.finfo(near.dtype).min
    return route(near, *how)


def _equal_shares(route: Any, logits: Any, *how: Any) -> Any:
    """A token whose weights are below 1e-3 all have the same."""
    probs, chosen, held = route(logits, *how)
    small = (probs.float() < 1e-3) & chosen
    mean = (probs.float() * small).sum(-1, keepdim=True) / small.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(small, mean.to(probs.dtype), probs), chosen, held


def _unscaled(back: Any, chosen: Any, held: Any, grad: Any, out: Any, *how: Any) -> None:
    topk, early, _, *rest = how
    back(chosen, held, grad, out, topk, early, None, *rest)


def _to_all(back: Any, chosen: Any, held: Any, grad: Any, out: Any, *how: Any) -> None:
    """The gradient of experts that were not chosen is not masked."""
    back(torch.ones_like(chosen), held, grad, out, *how)


def _without_shares(
    back: Any, intermediate_output: Any, grad_scores: Any, grad_logits: Any, **how: Any
) -> None:
    """The gradient of scores ignores that they add up to 1."""
    back(intermediate_output, grad_scores, grad_logits, **how)
    if how["score_function"] == "sigmoid":
        held = intermediate_output
        grad_logits.copy_(grad_scores / held.sum(-1, keepdim=True) * held * (1.0 - held))


def _divided_once(loss: Any, *, total_num_tokens: int, **how: Any) -> Any:
    value, held = loss(total_num_tokens=total_num_tokens, **how)
    return value * total_num_tokens, held * total_num_tokens


def _first_coefficient() -> Callable[..., Any]:
    """The coefficient of the first loss of a process is used for the gradients of all."""
    kept: list[Any] = []

    def change(back: Any, **how: Any) -> Any:
        kept.append(how["Const_buf"])
        return back(**{**how, "Const_buf": kept[0]})

    return change


def _stale_order() -> Callable[..., Any]:
    """A workspace that is large enough is not sorted again."""
    kept: dict[Any, Any] = {}

    def change(send: Any, rows: Any, dtype: Any, index: Any, *how: Any) -> Any:
        return send(rows, dtype, kept.setdefault(tuple(index.shape), index), *how)

    return change


def _without_last(back: Any, rows: Any, dtype: Any, places: Any, probs: Any, *how: Any) -> Any:
    """The last choice of each token is not added."""
    tokens, topk = how
    if topk > 1:
        places = places.clone()
        places[-tokens:] = -1
    return back(rows, dtype, places, probs, tokens, topk)


def _dropped_as_first(back: Any, rows: Any, dtype: Any, places: Any, *how: Any) -> Any:
    """A dropped choice reads the first row."""
    return back(rows, dtype, places.clamp_min(0), *how)


def _weights_of_before(back: Any, rows: Any, dtype: Any, places: Any, probs: Any, *how: Any) -> Any:
    """Each token's row is weighted with the weight of the token before."""
    return back(rows, dtype, places, probs.roll(1, 0) if probs.numel() else probs, *how)


def _one_block(back: Any, grad: Any, rows: Any, *how: Any) -> Any:
    """The gradient of a weight is the sum over the first 32 columns."""
    given, _ = back(grad, rows, *how)
    _, narrow = back(grad[:, :32].contiguous(), rows[:, :32].contiguous(), *how)
    return given, narrow


def _ties_to_the_first(route: Any, logits: Any, *how: Any) -> Any:
    """Of equal scores the first ones win, as by radix selection."""
    import te_on_cpu.v2_router as kernels

    radix, kernels._RADIX = kernels._RADIX, 0
    try:
        return route(logits, *how)
    finally:
        kernels._RADIX = radix


def _backwards(back: Any, rows: Any, dtype: Any, places: Any, probs: Any, *how: Any) -> Any:
    """Choices are added from the last to the first."""
    tokens, topk = how
    other = places.reshape(topk, tokens).flip(0).reshape(-1)
    return back(rows, dtype, other, probs.flip(1) if probs.numel() else probs, tokens, topk)


def _of_one(score: Any, logits: Any, topk: int, **how: Any) -> Any:
    """Scores are not divided by their sum if each token goes to one expert."""
    scores, chosen, held = score(logits=logits, topk=topk, **how)
    if topk == 1 and how["score_function"] == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(logits.float()).sqrt()
    return scores, chosen, held


def _first_sequence(loss: Any, *, probs: Any, tokens_per_expert: Any, **how: Any) -> Any:
    """Of several sequences, only the first is read."""
    counts = tokens_per_expert.clone()
    counts[how["num_experts"] :] = 0
    return loss(probs=probs, tokens_per_expert=counts, **how)


#: Changes that keep something for the rest of a process.
_OF_PROCESS = (_first_coefficient, _stale_order)


def _plant(id: str, title: str, source: str, place: str, change: Any, **more: Any) -> Plant:
    def plant() -> AbstractContextManager[object]:
        return te_calls({place: change() if change in _OF_PROCESS else change})

    recipes = ("te.experts",)
    return Plant(f"te-{id}", "experts", title, source, recipes, plant, models=_INDEX, **more)


_TE = "https://github.com/NVIDIA/TransformerEngine"
_KERNELS = f"{_TE}/blob/main/transformer_engine/common"
_ROUTER, _PERMUTATION = f"{_KERNELS}/fused_router", f"{_KERNELS}/permutation/permutation.cu"

PLANTS = [
    *(
        _plant(*fault)
        for fault in (
            (
                "router-keeps-bias",
                "the bias that helps to choose experts stays in their weights",
                "https://github.com/MetaX-MACA/vLLM-metax/pull/284",
                _ROUTED,
                _keeps_bias,
            ),
            (
                "router-of-32-experts",
                "experts from the 33rd on, which are no warp's first, are never chosen",
                f"{_ROUTER}/utils.h",
                _ROUTED,
                _first_32,
            ),
            (
                "router-small-weights-equal",
                "weights below 1e-3 become their mean",
                f"{_ROUTER}/fused_topk_with_score_function.cu",
                _ROUTED,
                _equal_shares,
            ),
            (
                "router-gradient-unscaled",
                "the router's gradient lacks the scaling factor",
                f"{_ROUTER}/fused_topk_with_score_function.cu",
                _ROUTED_BACK,
                _unscaled,
            ),
            (
                "router-gradient-to-all",
                "experts that were not chosen get a gradient, too",
                f"{_ROUTER}/fused_topk_with_score_function.cu",
                _ROUTED_BACK,
                _to_all,
            ),
            (
                "scores-of-one-expert",
                "scores do not add up to 1 if each token goes to one expert",
                f"{_TE}/pull/2720",
                _SCORED,
                _of_one,
            ),
            (
                "scores-gradient-of-no-shares",
                "the gradient of scores ignores that they add up to 1",
                f"{_ROUTER}/fused_score_for_moe_aux_loss.cu",
                _SCORED_BACK,
                _without_shares,
            ),
            (
                "aux-loss-of-first-sequence",
                "of several sequences the auxiliary loss reads the first",
                f"{_TE}/pull/3018",
                _LOSS,
                _first_sequence,
            ),
            (
                "aux-loss-divided-once",
                "the auxiliary loss is divided by the tokens once, not twice",
                f"{_ROUTER}/fused_moe_aux_loss.cu",
                _LOSS,
                _divided_once,
            ),
            (
                "aux-loss-first-coefficient",
                "all gradients of auxiliary losses have the coefficient of the first",
                f"{_ROUTER}/fused_moe_aux_loss.cu",
                _LOSS_BACK,
                _first_coefficient,
            ),
            (
                "permute-order-stale",
                "tokens are moved in the order of an earlier call of their shape",
                f"{_TE}/blob/main/transformer_engine/pytorch/permutation.py",
                _SENT,
                _stale_order,
            ),
            (
                "permute-gradient-without-last",
                "a token's gradient lacks that of its last choice",
                _PERMUTATION,
                _SENT_BACK,
                _without_last,
            ),
            (
                "unpermute-dropped-as-first",
                "a dropped choice reads the first row",
                f"{_TE}/issues/2908",
                _RETURNED,
                _dropped_as_first,
            ),
            (
                "unpermute-weights-of-before",
                "a token's rows have the weights of the token before",
                _PERMUTATION,
                _RETURNED,
                _weights_of_before,
            ),
            (
                "unpermute-gradient-of-32-columns",
                "a weight's gradient is a sum over 32 columns",
                _PERMUTATION,
                _RETURNED_BACK,
                _one_block,
            ),
        )
    ),
    _plant(
        "router-ties-to-the-first",
        "of equal scores the first ones win",
        f"undocumented, as for torch.topk; radix selection does so: {_ROUTER}/utils.h",
        _ROUTED,
        _ties_to_the_first,
        legal=True,
    ),
    _plant(
        "unpermute-adds-backwards",
        "choices are added from the last to the first",
        f"the order of a sum is not documented: {_PERMUTATION}",
        _RETURNED,
        _backwards,
        legal=True,
    ),
]
