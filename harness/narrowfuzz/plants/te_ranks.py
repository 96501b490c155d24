"""TransformerEngine's delayed scaling on ranks: faults in the reduction of amaxes over a group.

No report of such a fault is known to us; each link is to the code that the fault breaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant

_REDUCE = "quantization:FP8GlobalStateManager.reduce_tensor_across_group_op_max"
_UPDATE = "quantization:FP8GlobalStateManager.reduce_and_update_fp8_tensors"
_ENTER = "quantization:FP8GlobalStateManager.autocast_enter"


def _not_reduced(reduce: Any, tensor: Any, group: Any) -> None:
    """Each rank keeps its own maxima."""


def _added(reduce: Any, tensor: Any, group: Any) -> None:
    """The sum of the ranks' maxima is taken for the largest."""
    import torch.distributed as dist

    dist.all_reduce(tensor, group=group)


def _of_first_rank(reduce: Any, tensor: Any, group: Any) -> None:
    """The first rank's maxima are taken for the largest."""
    import torch.distributed as dist

    dist.broadcast(tensor, 0, group=group)


def _forward_only(update: Any, forward: bool = True) -> None:
    """The amaxes of output gradients are not reduced: each rank updates with its own."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    arguments = FP8GlobalStateManager.quantization_state.autocast_arguments
    before = dict(arguments)
    if not forward:
        for key, (recipe, group) in before.items():
            if hasattr(recipe, "reduce_amax"):
                arguments[key] = dataclasses.replace(recipe, reduce_amax=False), group
    try:
        update(forward=forward)
    finally:
        arguments.update(before)


def _over_all(enter: Any, *args: Any, **kwargs: Any) -> None:
    """``fp8_group`` is ignored, and amaxes are reduced over all ranks."""
    enter(*args, **{**kwargs, "fp8_group": None})


def _fault(id: str, title: str, link: str, changes: dict[str, Callable[..., Any]]) -> Plant:
    return Plant(
        id,
        "sharding",
        title,
        link,
        ("te.delayed",),
        partial(te_calls, changes),
        arms=("sharded_processes*",),
    )


_TE = "https://github.com/NVIDIA/TransformerEngine"
_SOURCE = f"{_TE}/blob/main/transformer_engine/pytorch/quantization.py"

PLANTS = [
    _fault("te-amax-not-reduced", "a rank's maxima stay its own", _SOURCE, {_REDUCE: _not_reduced}),
    _fault("te-amax-added", "maxima of ranks are added up", _SOURCE, {_REDUCE: _added}),
    _fault(
        "te-amax-of-first-rank",
        "the first rank's maxima are taken for all",
        _SOURCE,
        {_REDUCE: _of_first_rank},
    ),
    _fault(
        "te-amax-forward-only",
        "maxima of gradients are not reduced",
        _SOURCE,
        {_UPDATE: _forward_only},
    ),
    _fault(
        "te-amax-of-all-ranks",
        "maxima are reduced over all ranks, whatever the group",
        _SOURCE,
        {_ENTER: _over_all},
    ),
]
