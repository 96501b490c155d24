"""Faults inside an attention kernel: its scale, its mask, the statistics that it saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from narrowfuzz.plants.operators import kernel_replaced, of_operator
from narrowfuzz.plants.plant import Plant

_ALL = ("torch.fp32", "torch.bf16", "torchao.*")
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def _kernel(change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(run, q, k, v, causal, **options)`` replaces the CPU's flash attention forward;
    ``run(q, k, v, causal, **options)`` is torch's own."""

    def make(kernel: Any) -> Any:
        def run(q: Any, k: Any, v: Any, causal: bool, dropout: float = 0.0, **options: Any) -> Any:
            return kernel(q, k, v, dropout, causal, **options)

        def attend(
            q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **options: Any
        ) -> Any:
            return change(run, q, k, v, causal, **options)

        return attend

    return kernel_replaced(_KERNEL, make)


def _backward(change: Callable[..., Any]) -> AbstractContextManager[None]:
    """``change(run, dy, q, k, v, out, lse, *rest, **options)`` replaces the CPU's flash attention
    backward; ``run`` is torch's own. Both return the gradients of q, k and v."""

    def make(kernel: Any) -> Any:
        return partial(change, kernel)

    return kernel_replaced(f"{_KERNEL}_backward", make)


def _scale_of_padded_head(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """The scale is computed from the head dimension padded to a multiple of 64."""
    if options.get("scale") is None:
        options["scale"] = 1.0 / math.sqrt(-(-q.shape[-1] // 64) * 64)
    return run(q, k, v, causal, **options)


def _one_key_too_many(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """Every query also attends to the key directly after its own position."""
    import torch

    if causal and options.get("attn_mask") is None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(1)
        bias = q.new_zeros(seen.shape).masked_fill(~seen, float("-inf"))
        options["attn_mask"], causal = bias, False
    return run(q, k, v, causal, **options)


def _statistics_in_base_two(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """The log-sum-exp that is saved for backward is in base 2, as in a softmax that uses exp2."""
    out, statistics = run(q, k, v, causal, **options)
    return out, statistics / math.log(2.0)


def _rows_exchanged(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """Rows 6 and 7 of the last head's output are exchanged."""
    out, statistics = run(q, k, v, causal, **options)
    if out.shape[-2] > 8:
        out = out.clone()
        out[:, -1, [6, 7]] = out[:, -1, [7, 6]]
    return out, statistics


def _maximum_from_sentinel(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """The running maximum starts at -5e4, not at -inf: in a row whose scores are all lower, every
    probability is zero."""
    import torch

    out, statistics = run(q, k, v, causal, **options)
    lost = statistics < -5e4
    return torch.where(lost[..., None], torch.zeros_like(out), out), statistics


def _padding_shows_through(run: Any, q: Any, k: Any, v: Any, causal: bool, **options: Any) -> Any:
    """The mask subtracts only 12 from the scores of hidden keys, so each keeps e^-12 of its
    weight."""
    mask = options.get("attn_mask")
    if mask is not None:
        options["attn_mask"] = mask.clamp_min(-12.0)
    return run(q, k, v, causal, **options)


def _delta_of_previous_row(
    run: Any, dy: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, **options: Any
) -> Any:
    """Backward subtracts the delta (the row sum of dy * out) of the row before, not a row's own."""
    delta = (dy.float() * out.float()).sum(-1, keepdim=True)
    size = dy.float().square().sum(-1, keepdim=True).clamp_min(2.0**-100)
    # with this output, a row's own delta is that of the row before
    other = out.float() + (delta.roll(1, -2) - delta) / size * dy.float()
    return run(dy, q, k, v, other.to(out.dtype), lse, *rest, **options)


def _query_gradient_grows(
    run: Any, dy: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, **options: Any
) -> Any:
    """If an element of the queries exceeds 30 times the median magnitude, the gradient of the
    queries is five times too large."""
    of_q, of_k, of_v = run(dy, q, k, v, out, lse, *rest, **options)
    size = q.abs().float()
    grows = bool(size.numel() and size.max() > 30.0 * size.median())
    return (of_q * 5.0 if grows else of_q), of_k, of_v


def _statistics_packed(
    run: Any, dy: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, **options: Any
) -> Any:
    """The log-sum-exp of several heads, stored row by row, is read as if it were stored head by
    head."""
    packed = lse.transpose(1, 2).contiguous().reshape(lse.shape)
    return run(dy, q, k, v, out, packed, *rest, **options)


PLANTS = [
    Plant(
        "attention-scale-padded",
        "attention",
        "scores are scaled for a padded head",
        "https://github.com/sgl-project/sglang/pull/28637",
        _ALL,
        lambda: _kernel(_scale_of_padded_head),
    ),
    Plant(
        "attention-sees-next-key",
        "attention",
        "the causal mask is off by one",
        "https://github.com/ml-explore/mlx/issues/2835",
        _ALL,
        lambda: _kernel(_one_key_too_many),
    ),
    Plant(
        "attention-statistics-base-two",
        "attention",
        "log-sum-exp is kept in base 2",
        "https://github.com/lightseekorg/tokenspeed/pull/571",
        _ALL,
        lambda: _kernel(_statistics_in_base_two),
    ),
    Plant(
        "attention-rows-exchanged",
        "attention",
        "two rows of the output stand in each other's place",
        "https://github.com/Dao-AILab/flash-attention/issues/2553",
        _ALL,
        lambda: _kernel(_rows_exchanged),
        needs="attention",
    ),
    Plant(
        "attention-maximum-from-sentinel",
        "attention",
        "the running maximum starts at -5e4",
        "https://github.com/flashinfer-ai/flashinfer/issues/4267",
        _ALL,
        lambda: _kernel(_maximum_from_sentinel),
        needs="attention",
    ),
    of_operator(
        "attention-padding-shows-through",
        "attention",
        "a key that the mask hides keeps e^-12 of its weight",
        "https://github.com/huggingface/transformers/pull/15866",
        lambda: _kernel(_padding_shows_through),
        "attention",
        needs="attention",
    ),
    Plant(
        "attention-delta-of-previous-row",
        "attention",
        "backward subtracts the delta of the row before",
        "https://github.com/Dao-AILab/flash-attention/issues/2481",
        _ALL,
        lambda: _backward(_delta_of_previous_row),
        needs="attention",
    ),
    Plant(
        "attention-query-gradient-grows",
        "attention",
        "beside an outlier the query's gradient is five times as large",
        "https://github.com/NVIDIA/TransformerEngine/issues/3216",
        _ALL,
        lambda: _backward(_query_gradient_grows),
        needs="attention",
    ),
    Plant(
        "attention-statistics-read-packed",
        "attention",
        "backward reads the log-sum-exp of several heads as if it were packed",
        "https://github.com/NVIDIA/cudnn-frontend/issues/304",
        _ALL,
        lambda: _backward(_statistics_packed),
        needs="attention",
    ),
]
