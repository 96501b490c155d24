"""Delayed scaling whose recompute differs from its forward, or leaves state behind.

Each fault has the mechanism of a real bug, planted in ``narrowfuzz.recipe.delayed``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from narrowfuzz.plants.patching import delayed_calls
from narrowfuzz.plants.plant import Plant

_Context = AbstractContextManager[None]


def _state() -> Any:
    from narrowfuzz.recipe import delayed

    return delayed._state


def _default_recipe(replay: Any, tape: Any, function: Any, x: Any) -> Any:
    from narrowfuzz.recipe.delayed import DelayedScaling

    recipe = tape.recipe and DelayedScaling()
    return replay(replace(tape, recipe=recipe), function, x)


def _high_precision(replay: Any, tape: Any, function: Any, x: Any) -> Any:
    return replay(replace(tape, recipe=None), function, x)


def _restages(layer: Any, x: Any) -> Any:
    """Stage the maxima of input and weight if this is a recompute in FP8. Returns the recompute's
    recipe, or None if it is no such recompute."""
    state = _state()
    if not state.replaying or state.recipe is None:
        return None
    layer.stage("forward", 1, layer.weight)
    layer.stage("forward", 0, x)
    return state.recipe


def _stages_again(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    recipe = _restages(layer, x)
    if recipe is not None:
        _state().staged[layer] = recipe
    return forward(layer, x, is_first_microbatch)


def _commits_again(forward: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
    recipe = _restages(layer, x)
    if recipe is not None:
        layer.commit("forward", recipe)
    return forward(layer, x, is_first_microbatch)


def _newest_scales(scales: Any, layer: Any, recipe: Any) -> Any:
    found = scales(layer, recipe)
    return layer.forward_scale.clone() if _state().replaying else found


def _stash_decided_at_entry(scales: Any, layer: Any, recipe: Any) -> Any:
    """A checkpoint that was entered in high precision saves no scales for its recompute."""
    found = scales(layer, recipe)
    for tape in _state().recording:
        if tape.recipe is None:
            tape.scales.pop()
    return found


def _first_in_first_out() -> _Context:
    """Recomputes use the tapes in the order of the forwards, not each its own."""
    tapes: list[Any] = []

    def record(original: Any, *args: Any) -> Any:
        tapes.append(original(*args))
        return tapes[-1]

    def replay(original: Any, tape: Any, function: Any, x: Any) -> Any:
        return original(tapes.pop(0) if tapes else tape, function, x)

    def reset(original: Any, state: Any) -> None:
        tapes.clear()
        original(state)

    return delayed_calls({"_Tape": record, "_replay": replay, "_State.__init__": reset})


def _stash_outlives_model() -> _Context:
    """The first recompute of the next model uses the scales of a forward that was dropped."""
    waiting: list[Any] = []
    models = [0]

    def build(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        models[0] += 1
        original(layer, *args, **kwargs)

    def record(original: Any, *args: Any) -> Any:
        tape = original(*args)
        tape.model = models[0]
        waiting.append(tape)
        return tape

    def replay(original: Any, tape: Any, function: Any, x: Any) -> Any:
        older = next((other for other in waiting if other.model < tape.model), None)
        for gone in {tape, older} & set(waiting):
            waiting.remove(gone)
        return original(older or tape, function, x)

    def reset(original: Any, state: Any) -> None:
        waiting.clear()
        original(state)

    return delayed_calls(
        {
            "DelayedLinear.__init__": build,
            "_Tape": record,
            "_replay": replay,
            "_State.__init__": reset,
        }
    )


def _open_until_replayed() -> _Context:
    """A tape is closed only by its recompute, so a forward that is dropped leaves one open for
    good."""

    def checkpoint(original: Any, function: Any, x: Any, *, use_reentrant: bool) -> Any:
        recording = _state().recording

        def once_more(x: Any) -> Any:
            out = function(x)
            recording.extend(recording[-1:])  # the original removes it once
            return out

        def run(x: Any) -> Any:
            return (function if _state().replaying else once_more)(x)

        return original(run, x, use_reentrant=use_reentrant)

    def replay(original: Any, tape: Any, function: Any, x: Any) -> Any:
        if tape in _state().recording:
            _state().recording.remove(tape)
        return original(tape, function, x)

    return delayed_calls({"checkpoint": checkpoint, "_replay": replay})


_TE = "https://github.com/NVIDIA/TransformerEngine"


def _fault(id: str, title: str, link: str, plant: Callable[[], _Context]) -> Plant:
    return Plant(id, "delayed recompute", title, link, ("reference.delayed",), plant)


def _calls(name: str, change: Callable[..., Any]) -> Callable[[], _Context]:
    return lambda: delayed_calls({name: change})


PLANTS = [
    _fault("recompute-default-recipe", "recompute runs the default recipe",
           f"{_TE}/pull/1577", _calls("_replay", _default_recipe)),
    _fault("recompute-high-precision", "recompute runs outside FP8",
           f"{_TE}/pull/24", _calls("_replay", _high_precision)),
    _fault("recompute-stages", "recompute stages its maxima once more",
           f"{_TE}/pull/24", _calls("DelayedLinear.forward", _stages_again)),
    _fault("recompute-commits", "recompute updates the state once more",
           "https://github.com/Lightning-AI/lightning-thunder/issues/2027",
           _calls("DelayedLinear.forward", _commits_again)),
    _fault("recompute-newest-scale", "recompute quantises with the present scales",
           f"{_TE}/pull/24", _calls("DelayedLinear._scales", _newest_scales)),
    _fault("recompute-first-in-first-out", "recompute takes the oldest forward's scales",
           f"{_TE}/pull/1254", _first_in_first_out),
    _fault("tape-of-dropped-forward", "a forward without a backward leaves its scales to others",
           f"{_TE}/pull/3284", _stash_outlives_model),
    _fault("tape-stays-open", "a forward's recording is only closed by its recompute",
           f"{_TE}/pull/3284", _open_until_replayed),
    _fault("stash-decided-at-entry", "FP8 enabled inside a checkpoint keeps no scales",
           f"{_TE}/pull/3284", _calls("DelayedLinear._scales", _stash_decided_at_entry)),
]  # fmt: skip
