"""Delayed scaling whose updates come at the wrong time, or for the wrong layers.

Each fault has the mechanism of a real bug, planted in ``narrowfuzz.recipe.delayed``. A fault's own
memory lasts from its planting to its removal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from narrowfuzz.plants.patching import delayed_calls
from narrowfuzz.plants.plant import Plant

_Context = AbstractContextManager[None]


def _state() -> Any:
    from narrowfuzz.recipe import delayed

    return delayed._state


def _trains() -> bool:
    """True in a training forward in FP8 that is not a recompute."""
    from narrowfuzz.recipe import delayed

    state = delayed._state
    return state.recipe is not None and not state.replaying and delayed._trains()


def _frozen_under_checkpoint() -> _Context:
    """A backward pass that recomputes updates no scale."""
    replayed: list[Any] = []

    def replay(original: Any, tape: Any, function: Any, x: Any) -> Any:
        replayed.append(tape)
        return original(tape, function, x)

    def commit(original: Any) -> None:
        if replayed:
            _state().staged_backward.clear()
        replayed.clear()
        original()

    return delayed_calls({"_replay": replay, "commit_backward": commit})


def _at_each_node() -> _Context:
    """A layer is updated each time that a backward pass reaches it, not once in the pass."""

    def backward(original: Any, ctx: Any, grad: Any) -> Any:
        from narrowfuzz.recipe import delayed

        grads = original(ctx, grad)
        delayed.commit_backward()
        return grads

    return delayed_calls({"_Product.backward": backward})


def _after_the_first_node() -> _Context:
    """The update runs once in a backward pass, but already after the pass's first layer."""
    from narrowfuzz.recipe import delayed

    commit = delayed.commit_backward
    done: list[Any] = []

    def backward(original: Any, ctx: Any, grad: Any) -> Any:
        grads = original(ctx, grad)
        if not done:
            done.append(ctx.layer)
            commit()
        return grads

    return delayed_calls(
        {"_Product.backward": backward, "commit_backward": lambda original: done.clear()}
    )


def _through_the_last_forward() -> _Context:
    """Only the backward pass through the newest forward updates."""
    forwards, reached = [0], [0]

    def forward(original: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
        from narrowfuzz.recipe import delayed

        forwards[0] += delayed._trains()
        return original(layer, x, is_first_microbatch)

    def product(original: Any, ctx: Any, *args: Any) -> Any:
        ctx.number = forwards[0]
        return original(ctx, *args)

    def backward(original: Any, ctx: Any, grad: Any) -> Any:
        reached[0] = max(reached[0], ctx.number)
        return original(ctx, grad)

    def commit(original: Any) -> None:
        if reached[0] < forwards[0]:
            _state().staged_backward.clear()
        original()

    return delayed_calls(
        {
            "DelayedLinear.forward": forward,
            "_Product.forward": product,
            "_Product.backward": backward,
            "commit_backward": commit,
        }
    )


def _owned_by_the_first_layer() -> _Context:
    """The backward of a region's first layer updates all layers; if that layer has no backward,
    none is updated."""

    def forward(original: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
        if _trains():
            layer.owner = weakref.ref(next(iter(_state().staged), layer))
        return original(layer, x, is_first_microbatch)

    def commit(original: Any) -> None:
        staged = _state().staged_backward
        if not any(layer.owner() in staged for layer in staged):
            staged.clear()
        original()

    return delayed_calls({"DelayedLinear.forward": forward, "commit_backward": commit})


@contextmanager
def _leaves(autocast: Any, recipe: Any) -> Any:
    """Leaving any region updates, not only leaving the outermost one."""
    from narrowfuzz.recipe import delayed

    with autocast(recipe):
        yield
    if not delayed._state.replaying:
        delayed.commit_forward()


def _idle_layers_roll() -> _Context:
    """Leaving a region shifts the history of every layer that ever ran, not only of those that ran
    in the region."""
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def forward(original: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
        known.add(layer)
        return original(layer, x, is_first_microbatch)

    def commit(original: Any) -> None:
        idle = [layer for layer in known if layer not in _state().staged]
        original()
        for layer in idle:
            layer.forward_window.copy_(layer.forward_window.roll(-1, 0))
            layer.forward_window[0] = 0

    return delayed_calls({"DelayedLinear.forward": forward, "commit_forward": commit})


def _lost_at_evaluation() -> _Context:
    """A layer loses its pending update if its last forward was an evaluation."""
    evaluated: weakref.WeakSet[Any] = weakref.WeakSet()

    def forward(original: Any, layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
        (evaluated.discard if _trains() else evaluated.add)(layer)
        return original(layer, x, is_first_microbatch)

    def commit(original: Any) -> None:
        for layer in [layer for layer in _state().staged if layer in evaluated]:
            del _state().staged[layer]
        original()

    return delayed_calls({"DelayedLinear.forward": forward, "commit_forward": commit})


def _keyed_by_number() -> _Context:
    """State is stored under a number, which a later layer gets again once the first owner is
    gone."""
    living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    buffers: dict[int, Any] = {}

    def init(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        original(layer, *args, **kwargs)
        number = next(i for i in range(len(living) + 1) if i not in living)
        living[number] = layer
        layer._buffers.update(buffers.setdefault(number, dict(layer._buffers)))

    return delayed_calls({"DelayedLinear.__init__": init})


_TE = "https://github.com/NVIDIA/TransformerEngine"


def _fault(id: str, title: str, link: str, plant: Callable[[], _Context]) -> Plant:
    return Plant(id, "delayed updates", title, link, ("reference.delayed",), plant)


PLANTS = [
    _fault("backward-scale-frozen-by-checkpoint", "a pass that recomputes updates no scale",
           f"{_TE}/issues/1190", _frozen_under_checkpoint),
    _fault("update-at-each-node", "one backward pass updates a layer several times",
           "https://github.com/NVIDIA/Megatron-LM/pull/7051", _at_each_node),
    _fault("update-before-maxima", "the update runs before all layers' maxima are in",
           f"{_TE}/pull/3456", _after_the_first_node),
    _fault("update-keyed-to-last-forward", "only the newest forward's backward updates",
           f"{_TE}/pull/3456", _through_the_last_forward),
    _fault("first-layer-owns-update", "without a backward of the first layer nobody updates",
           f"{_TE}/pull/784", _owned_by_the_first_layer),
    _fault("inner-region-updates", "leaving an inner region updates",
           f"{_TE}/pull/1254", lambda: delayed_calls({"autocast": _leaves})),
    _fault("idle-history-rolls", "zeros move into the history of layers that did not run",
           f"{_TE}/pull/825", _idle_layers_roll),
    _fault("update-lost-at-evaluation", "an evaluation drops the update that was due",
           f"{_TE}/pull/59", _lost_at_evaluation),
    _fault("evaluation-stages", "a forward without a graph stages its maxima",
           f"{_TE}/pull/59", lambda: delayed_calls({"_trains": lambda original: True})),
    _fault("state-outlives-model", "a new layer takes over the state of one that is gone",
           f"{_TE}/pull/1326", _keyed_by_number),
]  # fmt: skip
