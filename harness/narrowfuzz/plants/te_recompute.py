"""TransformerEngine's checkpoint whose recompute differs from its forward, or leaves state behind.

Each fault has the mechanism of a real bug, planted in ``transformer_engine.pytorch`` where it stood
or would stand today.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.plant import Plant


def _no_region(autocast: Any, *, enabled: bool, recipe: Any) -> Any:
    return autocast(enabled=False, recipe=recipe)


def _asks_anew(prepare: Any, layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Whether a recomputed layer runs in FP8 depends on the region around the recompute, not on
    that of its forward."""
    from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if in_fp8_activation_recompute_phase():
        layer.fast_setattr("fp8", FP8GlobalStateManager.is_fp8_enabled())
    return prepare(layer, x, *args, **kwargs)


def _region_of_the_backward(autocast: Any, *, enabled: bool, recipe: Any) -> Any:
    """A recompute uses the recipe that is current when it runs; outside regions the default."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return autocast(enabled=enabled, recipe=FP8GlobalStateManager.get_fp8_recipe())


def _takes_the_regions_recipe(
    prepare: Any, layer: Any, x: Any, num_gemms: int = 1, *args: Any, **kwargs: Any
) -> Any:
    from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

    if layer.fp8 and in_fp8_activation_recompute_phase():
        layer.init_fp8_metadata(num_gemms=num_gemms)
    return prepare(layer, x, num_gemms, *args, **kwargs)


def _newest_scales(switch: Any, meta: dict[str, Any]) -> None:
    """A recompute uses the current scales instead of those stashed by its forward."""
    switch(meta)
    if "updated_scale_fwd" in meta:
        meta["scaling_fwd"].scale.copy_(meta["updated_scale_fwd"])


def _stays_staged(restore: Any, meta: dict[str, Any]) -> None:
    """The maxima of a recompute stay in the staging cells."""
    staged = getattr(meta["scaling_fwd"], "amax_history", None)
    staged = None if staged is None else staged[0].clone()
    restore(meta)
    if staged is not None:
        cells = meta["scaling_fwd"].amax_history[0]
        cells.copy_(cells.maximum(staged))


def _region_known_at_entry(enter: Any, region: Any) -> None:
    """A checkpoint saves FP8 state for its recompute only if FP8 was on when it was entered."""
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    enter(region)
    if not FP8GlobalStateManager.is_fp8_enabled():
        distributed._IN_ACTIVATION_RECOMPUTE_REGION = False


def _stash_keeps_views(stash: Any, meta: dict[str, Any]) -> None:
    """The scale stashed for the recompute is the live tensor, which the next update changes."""
    stash(meta)
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    place = meta.get("global_fp8_buffer_pos_fwd_recompute")
    if place is not None:
        waiting = FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer[place]
        waiting[-1][1] = meta["scaling_fwd"].scale


_TE = "https://github.com/NVIDIA/TransformerEngine"
_FP8 = "quantization:FP8GlobalStateManager"
_PREPARE = "module.base:TransformerEngineBaseModule.prepare_forward"


def _fault(
    id: str, title: str, link: str, changes: dict[str, Callable[..., Any]], recipes: str
) -> Plant:
    return Plant(id, "delayed recompute", title, link, (recipes,), partial(te_calls, changes))


PLANTS = [
    _fault(
        "te-recompute-high-precision",
        "recompute runs outside FP8",
        f"{_TE}/pull/24",
        {"distributed:autocast": _no_region, _PREPARE: _asks_anew},
        "te.*",
    ),
    _fault(
        "te-recompute-by-current-recipe",
        "recompute goes by the recipe current in backward",
        f"{_TE}/pull/1577",
        {"distributed:autocast": _region_of_the_backward, _PREPARE: _takes_the_regions_recipe},
        "te.*",
    ),
    _fault(
        "te-recompute-newest-scale",
        "recompute quantises with the present scales",
        f"{_TE}/pull/24",
        {f"{_FP8}.get_old_fp8_meta_tensors_for_recompute": _newest_scales},
        "te.delayed",
    ),
    _fault(
        "te-recompute-stages",
        "recompute stages its maxima once more",
        "https://github.com/Lightning-AI/lightning-thunder/issues/2027",
        {f"{_FP8}.restore_fp8_meta_tensors": _stays_staged},
        "te.delayed",
    ),
    _fault(
        "te-stash-decided-at-entry",
        "FP8 enabled inside a checkpoint stashes no scales",
        f"{_TE}/pull/3284",
        {"distributed:activation_recompute_forward.__enter__": _region_known_at_entry},
        "te.delayed",
    ),
    _fault(
        "te-stash-keeps-live-scale",
        "scales stashed for a recompute move with the updates",
        f"{_TE}/pull/1597",
        {f"{_FP8}.copy_forward_fp8_meta_tensors_for_recompute": _stash_keeps_views},
        "te.delayed",
    ),
]
