"""Delayed scaling whose state is wrong: staged maxima, their commit, and saved state.

Each fault has the mechanism of a real bug, planted in ``narrowfuzz.recipe.delayed``; where no
report of one is known, its link is the definition that it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from narrowfuzz.plants.patching import delayed_calls
from narrowfuzz.plants.plant import Plant

_FP32_MAX = 3.4028234663852886e38


def _window(layer: Any, direction: str) -> Any:
    return getattr(layer, f"{direction}_window")


def _scale(layer: Any, direction: str) -> Any:
    return getattr(layer, f"{direction}_scale")


def _roll(window: Any) -> None:
    window.copy_(window.roll(-1, 0))
    window[0] = 0


def _forward_never_commits(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    if direction == "backward":
        commit(layer, direction, recipe)


def _advances_twice(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    commit(layer, direction, recipe)
    _roll(_window(layer, direction))


def _a_step_late(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    """A new scale takes effect only at the next commit."""
    scale = _scale(layer, direction)
    old = scale.clone()
    commit(layer, direction, recipe)
    new, waiting = scale.clone(), getattr(layer, f"late_{direction}", old)
    scale.copy_(waiting)
    setattr(layer, f"late_{direction}", new)


def _never_rolls(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    window = _window(layer, direction)
    before = window.clone()
    commit(layer, direction, recipe)
    window.copy_(before)


def _keeps_the_oldest(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    """The oldest cell, which the roll moves to the front, is not cleared."""
    window = _window(layer, direction)
    ran, oldest = window[0] != 0, window.roll(-1, 0)[0]
    commit(layer, direction, recipe)
    window[0] = oldest.where(ran, window[0])


def _one_cell_short(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    commit(layer, direction, recipe)
    _window(layer, direction)[1:2] = 0


def _amax(layer: Any, direction: str, recipe: Any) -> Any:
    window = _window(layer, direction)
    return window.amax(0) if recipe.algorithm == "max" else window[0].clone()


def _divides_by_zero(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    scale, amax = _scale(layer, direction), _amax(layer, direction, recipe)
    commit(layer, direction, recipe)
    scale[amax == 0] = _FP32_MAX


def _divides_by_infinity(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
    scale, amax = _scale(layer, direction), _amax(layer, direction, recipe)
    commit(layer, direction, recipe)
    scale[amax.isinf()] = 0


def _under(change: Callable[[Any], dict[str, Any]]) -> Callable[..., None]:
    """A commit under the recipe with some settings changed."""

    def commits(commit: Any, layer: Any, direction: str, recipe: Any) -> None:
        commit(layer, direction, replace(recipe, **change(recipe)))

    return commits


def _weight_gets_the_inputs(stage: Any, layer: Any, direction: str, slot: int, x: Any) -> None:
    if direction == "backward" or slot == 0:
        stage(layer, direction, slot, x)
    if direction == "forward" and slot == 0:
        stage(layer, direction, 1, x)


def _gradient_gets_the_inputs(stage: Any, layer: Any, direction: str, slot: int, x: Any) -> None:
    if direction == "forward" and slot == 0:
        layer.latest_input = x.detach()
    stage(layer, direction, slot, layer.latest_input if direction == "backward" else x)


def _overwrites(stage: Any, layer: Any, direction: str, slot: int, x: Any) -> None:
    _window(layer, direction)[0, slot] = 0
    stage(layer, direction, slot, x)


def _adds(stage: Any, layer: Any, direction: str, slot: int, x: Any) -> None:
    cell = _window(layer, direction)[0]
    before = cell[slot].clone()
    cell[slot] = 0
    stage(layer, direction, slot, x)
    cell[slot] += before


def _first_layers_index(stage: Any, layer: Any, direction: str, slot: int, x: Any) -> None:
    from narrowfuzz.recipe.delayed import _state

    owner = next(iter(_state.staged)) if direction == "forward" else layer
    stage(owner, direction, slot, x)


def _shares_state(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    """The later layers of a region use the forward state of its first layer."""
    from narrowfuzz.recipe.delayed import _state

    first = next(iter(_state.staged), layer)
    for name in ("forward_window", "forward_scale"):
        setattr(layer, name, getattr(first, name))
    return forward(layer, x, is_first_microbatch)


def _keeps_length(resize: Any, layer: Any, history: int) -> None:
    """A window is resized only if the layer's windows are all zero."""
    if not any(_window(layer, d).any() for d in ("forward", "backward")):
        resize(layer, history)


def _saves_as_new(buffer: str, value: float) -> Callable[..., None]:
    """In the saved state, one kind of buffer has a fresh layer's values."""

    def saves(save: Any, layer: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        save(layer, destination, prefix, keep_vars)
        for direction in ("forward", "backward"):
            name = f"{prefix}{direction}_{buffer}"
            destination[name] = destination[name].new_full(destination[name].shape, value)

    return saves


_TE = "https://github.com/NVIDIA/TransformerEngine"
_UPDATE = f"{_TE}/blob/main/transformer_engine/common/recipe/delayed_scaling.cu"
_LENGTH = f"{_TE}/blob/main/transformer_engine/pytorch/module/base.py"


def _fault(method: str, id: str, title: str, link: str, change: Callable[..., Any]) -> Plant:
    plant = partial(delayed_calls, {f"DelayedLinear.{method}": change})
    return Plant(id, "delayed state", title, link, ("reference.delayed",), plant)


_commit = partial(_fault, "commit")
_stage = partial(_fault, "stage")
_save = partial(_fault, "_save_to_state_dict")

PLANTS = [
    _commit("forward-scale-frozen", "leaving a region updates no forward scale",
            "https://github.com/ROCm/TransformerEngine/pull/349", _forward_never_commits),
    _commit("history-advances-twice", "one update moves the history by two cells",
            "https://github.com/NVIDIA/Megatron-LM/pull/7051", _advances_twice),
    _commit("scale-a-step-late", "a new scale waits for the update after it",
            _UPDATE, _a_step_late),
    _commit("history-never-rolls", "an update leaves the history where it is",
            _UPDATE, _never_rolls),
    _commit("history-keeps-oldest", "the cell where maxima are staged holds the oldest one",
            _UPDATE, _keeps_the_oldest),
    _commit("history-cell-short", "a maximum is forgotten one update early",
            _UPDATE, _one_cell_short),
    _commit("zero-amax-moves-scale", "a tensor of zeros makes an enormous scale",
            "https://github.com/pytorch/ao/issues/3356", _divides_by_zero),
    _commit("infinite-amax-zeroes-scale", "an infinite maximum makes scale 0",
            _UPDATE, _divides_by_infinity),
    _commit("margin-twice", "the margin is taken off twice", _UPDATE,
            _under(lambda recipe: {"margin": 2 * recipe.margin})),
    _commit("margin-sign", "the margin is added", _UPDATE,
            _under(lambda recipe: {"margin": -recipe.margin})),
    _commit("newest-taken-for-largest", "the newest maximum counts where the largest should",
            _UPDATE, _under(lambda recipe: {"algorithm": "most_recent"})),
    _commit("largest-taken-for-newest", "the largest maximum counts where the newest should",
            _UPDATE, _under(lambda recipe: {"algorithm": "max"})),
    _stage("weight-gets-inputs-amax", "the input's maximum is staged for the weight",
           f"{_TE}/pull/1128", _weight_gets_the_inputs),
    _stage("gradient-gets-inputs-amax", "the input's maximum is staged for the output gradient",
           f"{_TE}/pull/2355", _gradient_gets_the_inputs),
    _stage("amax-overwritten", "of several microbatches the last one's maximum is staged",
           "https://github.com/keras-team/keras/pull/19534", _overwrites),
    _stage("amax-added", "maxima of several microbatches are added",
           "https://github.com/google/flax/pull/3623", _adds),
    _stage("amax-at-first-layers-index", "a region's maxima are all staged for its first layer",
           f"{_TE}/pull/1128", _first_layers_index),
    _save("saved-without-history", "a saved state has no maxima", f"{_TE}/pull/323",
          _saves_as_new("window", 0.0)),
    _save("saved-without-scale", "a saved state has no scales", f"{_TE}/pull/123",
          _saves_as_new("scale", 1.0)),
    _fault("forward", "state-shared-by-layers", "a region's layers share their forward state",
           f"{_TE}/pull/1326", _shares_state),
    _fault("resize", "history-length-kept", "another recipe's history length is ignored",
           _LENGTH, _keeps_length),
]  # fmt: skip
