"""The subject of ``reference.delayed``. It is correct, so any finding on it is a planted fault."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from narrowfuzz.case.events import Settings
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.delayed import Policy
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.library import Cast, Product, Side
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.recipe.stateful import Held, Listener, Subject

#: The module in which faults are planted; scripts import it, too.
delayed = importlib.import_module("narrowfuzz.recipe.delayed")


def carries() -> Carries:
    """Everything except features that only a library has."""
    return Carries(
        layers=("linear",),
        layouts=("chain", "twice", "frozen_first", "dangling", "branch"),
        checkpoints=("full", "reentrant"),
        caching=True,
        settings=True,
        algorithms=("max", "most_recent"),
        reload=True,
        switch=True,
    )


def subject(device: str) -> Subject:
    return Subject(
        kind="delayed",
        layer=partial(_layer, device=device),
        autocast=_autocast,
        checkpoint=_checkpoint,
        backward=_backward,
        state=_state,
        pending=_pending,
        reset=_reset,
        listen=_listen,
        policy=policy,
        load=_load,
    )


def policy(settings: Settings) -> Policy:
    """The rules of its scaling state: every backward pass commits the maxima that it staged, and
    nothing else changes the backward state."""
    scaling = _scaling(settings)
    return Policy(
        settings.history,
        scaling.algorithm,
        scaling.margin,
        scaling.forward,
        scaling.backward,
        rolls_on_zero=not scaling.fused,
    )


def _scaling(settings: Any) -> Any:
    return delayed.DelayedScaling(
        settings.history,
        settings.algorithm,
        settings.margin,
        "e4m3",
        "e5m2" if settings.format == "hybrid" else "e4m3",
        fused=settings.fused,
    )


def _layer(spec: Spec, settings: Any, *, device: str) -> nn.Module:
    layer: nn.Module = delayed.DelayedLinear(
        spec.k, spec.k, bias=spec.bias, dtype=DTYPES[spec.dtype], history=settings.history
    )
    return layer.to(device)


def _autocast(settings: Any) -> AbstractContextManager[None]:
    region: AbstractContextManager[None] = delayed.autocast(
        None if settings is None else _scaling(settings)
    )
    return region


def _checkpoint(function: Any, x: torch.Tensor, reentrant: bool) -> Any:
    return delayed.checkpoint(function, x, use_reentrant=reentrant)


def _backward(outputs: list[torch.Tensor], grads: list[torch.Tensor], retain: bool) -> None:
    delayed.backward(outputs, grads, retain_graph=retain)


def _pending() -> dict[str, int]:
    pending: dict[str, int] = delayed.pending()
    return pending


def _reset() -> None:
    delayed.reset()


def _state(layers: Any) -> Iterator[Held]:
    for name, layer in layers.items():
        for direction in ("forward", "backward"):
            scale, window = (getattr(layer, f"{direction}_{x}") for x in ("scale", "window"))
            for i in range(len(scale)):
                yield (name, direction, i), scale[i], window[:, i]


@contextmanager
def _listen(layers: Any, listener: Listener) -> Iterator[None]:
    names = {id(layer): name for name, layer in layers.items()}

    def hear(seen: Any) -> None:
        if isinstance(seen, delayed.Cast):
            slot = (names[id(seen.layer)], seen.direction, seen.slot)
            listener(Cast(slot, seen.input, seen.codes, seen.scale, seen.format))
        else:
            a, b = _side(seen.a, seen.a_scale), _side(seen.b, seen.b_scale)
            listener(Product(seen.role, a, b))

    with delayed.listening(hear):
        yield


def _side(codes: torch.Tensor, scale: torch.Tensor) -> Side:
    return Side(codes, 1.0 / scale, "e4m3" if codes.dtype == torch.float8_e4m3fn else "e5m2")


def _load(layers: Any, state: dict[str, Any]) -> None:
    for name, layer in layers.items():
        layer.resize(len(state[f"{name}.forward_window"]))
    layers.load_state_dict(state)
