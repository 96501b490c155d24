"""A fault file: one planted fault of ``reference.delayed`` for every rule of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from narrowfuzz import Plant
from narrowfuzz.recipe import delayed
from narrowfuzz.recipe.delayed import DelayedLinear


@contextmanager
def _replaced(owner: Any, name: str, make: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _patch(owner: Any, name: str, make: Any) -> Any:
    return lambda: _replaced(owner, name, make)


def _no_commit(original: Any) -> Any:
    return lambda: delayed._state.staged_backward.clear()


def _margin_lost(original: Any) -> Any:
    def commit(layer: Any, direction: str, recipe: Any) -> None:
        original(layer, direction, recipe)
        if direction == "forward":
            layer.forward_scale.mul_(2.0)

    return commit


def _other_scale(original: Any) -> Any:
    def cast(layer: Any, direction: str, slot: int, x: Any, scales: Any, recipe: Any) -> Any:
        return original(layer, direction, slot, x, scales * 2, recipe)

    return cast


def _wrong_codes(original: Any) -> Any:
    def listening(listener: Any) -> Any:
        def other(seen: Any) -> None:
            if isinstance(seen, delayed.Cast) and seen.direction == "backward":
                seen.codes.view(torch.uint8).bitwise_and_(0xFE)
            listener(seen)

        return original(other)

    return listening


def _wrong_inverse(original: Any) -> Any:
    def product(role: str, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
        return original(role, a, a_scale * (2 if role == "grad_weight" else 1), b, b_scale)

    return product


def _present_scales(original: Any) -> Any:
    def scales(layer: Any, recipe: Any) -> Any:
        kept = original(layer, recipe)
        return layer.forward_scale.clone() if delayed._state.replaying else kept

    return scales


def _never_off(original: Any) -> Any:
    return lambda recipe: original(delayed._state.recipe if recipe is None else recipe)


def _weight_kept(original: Any) -> Any:
    def forward(layer: Any, x: Any, is_first_microbatch: Any = None) -> Any:
        again = layer.cached is not None and is_first_microbatch is None
        return original(layer, x, False if again else is_first_microbatch)

    return forward


def _left_over(original: Any) -> Any:
    def commit() -> None:
        staged = dict(list(delayed._state.staged_backward.items())[:1])
        original()
        delayed._state.staged.update(staged)

    return commit


def _nudged(original: Any) -> Any:
    def checkpoint(function: Any, x: Any, *, use_reentrant: bool) -> Any:
        return original(function, x, use_reentrant=use_reentrant) * (1 + 2.0**-6)

    return checkpoint


@contextmanager
def _remembers() -> Iterator[None]:
    """Models built after another one's backward begin with its scale."""
    left: list[float] = []

    def init(original: Any) -> Any:
        def made(layer: Any, *args: Any, **kwargs: Any) -> None:
            original(layer, *args, **kwargs)
            layer.backward_scale.fill_(left[-1] if left else 1.0)

        return made

    def commit(original: Any) -> Any:
        def committed() -> None:
            layers = list(delayed._state.staged_backward)
            original()
            left.extend(float(layer.backward_scale) for layer in layers)

        return committed

    def reset(original: Any) -> Any:
        def forgets() -> None:
            left.clear()
            original()

        return forgets

    with (
        _replaced(DelayedLinear, "__init__", init),
        _replaced(delayed, "commit_backward", commit),
        _replaced(delayed, "reset", reset),
    ):
        yield


def _rounded_on_save(original: Any) -> Any:
    def save(layer: Any, destination: Any, prefix: str, keep: bool) -> None:
        original(layer, destination, prefix, keep)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].bfloat16()

    return save


def _raises(original: Any) -> Any:
    def backward(outputs: Any, grads: Any, *, retain_graph: bool = False) -> None:
        if len(outputs) > 1:
            raise RuntimeError("one output at a time")
        original(outputs, grads, retain_graph=retain_graph)

    return backward


def _fault(id: str, plant: Any) -> Plant:
    return Plant(id, "schedule", id.replace("_", " "), "", ("reference.delayed",), plant)


PLANTS = [
    _fault("no_commit", _patch(delayed, "commit_backward", _no_commit)),
    _fault("scale_doubled", _patch(DelayedLinear, "commit", _margin_lost)),
    _fault("other_scale", _patch(DelayedLinear, "cast", _other_scale)),
    _fault("wrong_codes", _patch(delayed, "listening", _wrong_codes)),
    _fault("wrong_inverse", _patch(delayed, "_product", _wrong_inverse)),
    _fault("present_scales", _patch(DelayedLinear, "_scales", _present_scales)),
    _fault("never_off", _patch(delayed, "autocast", _never_off)),
    _fault("weight_kept", _patch(DelayedLinear, "forward", _weight_kept)),
    _fault("left_over", _patch(delayed, "commit_backward", _left_over)),
    _fault("nudged", _patch(delayed, "checkpoint", _nudged)),
    _fault("remembers", _remembers),
    _fault("rounded_on_save", _patch(DelayedLinear, "_save_to_state_dict", _rounded_on_save)),
    _fault("raises", _patch(delayed, "backward", _raises)),
]
