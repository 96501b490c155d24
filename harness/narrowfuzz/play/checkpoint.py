"""Activation checkpointing of a model: recompute everything, or all but what a policy saves.

The selective policy is torchtitan's: attention and every second matmul are saved, the rest is
recomputed. That is the dangerous kind: saved tensors must match the recomputed ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
_MATMULS = (_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default)
_KEPT = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


def recomputing(
    model: nn.Module, how: Callable[..., Any], regions: tuple[str, ...], whole: bool
) -> Any:
    """``model`` as a callable that recomputes in backward, by ``full``, ``reentrant`` or
    ``selective``: each of its submodules ``regions``, the ``whole`` model, or both, nested."""
    for name in regions:
        region = model.get_submodule(name)
        if "forward" not in vars(region):
            region.forward = partial(how, region.forward)
    return partial(how, model) if whole else model


def numbered(how: Callable[..., Any], place: Any) -> Callable[..., Any]:
    """``how``, but during a recompute ``place.forward`` and ``place.segment`` are the numbers of
    the forward and of its checkpointed call that is repeated: a block that a forward calls twice is
    recomputed last call first."""

    def checkpointed(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        place.segments += 1
        numbers = place.forward, place.segments

        def again(*args: Any, **named: Any) -> Any:
            now = place.forward, place.segment, place.segments
            place.forward, place.segment = numbers
            place.segments = numbers[1]  # nested checkpoints get the forward's numbers
            try:
                return function(*args, **named)
            finally:
                place.forward, place.segment = now[:2]
                place.segments = max(now[2], place.segments)

        return how(again, *args, **named)

    return checkpointed


full = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_every_second_matmul())


selective = partial(checkpoint, use_reentrant=False, context_fn=_selective_contexts)


def _every_second_matmul() -> Callable[..., CheckpointPolicy]:
    seen: Counter[str] = Counter()

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _KEPT:
            return CheckpointPolicy.MUST_SAVE
        if func in _MATMULS:
            phase = "recompute" if ctx.is_recompute else "forward"
            seen[phase] += 1
            if seen[phase] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
