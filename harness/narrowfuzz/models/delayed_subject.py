"""``reference.delayed`` behind a schedule's verbs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from narrowfuzz.case import Spec
from narrowfuzz.models import delayed
from narrowfuzz.models.delayed import DelayedLinear, DelayedScaling
from narrowfuzz.numerics.delayed import Policy, Slot
from narrowfuzz.schedule.carries import Carries
from narrowfuzz.schedule.events import Settings
from narrowfuzz.schedule.trace import Direction, SlotName
from narrowfuzz.stateful import Listener, RawCast, RawProduct, RawSide, Subject

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def carries() -> Carries:
    """All of a schedule but what only a library has."""
    return Carries(
        layers=("linear",),
        layouts=("chain", "twice", "frozen_first", "dangling", "branch"),
        checkpoints=(("library", False), ("library", True)),
        caching=True,
        settings=True,
        algorithms=("max", "most_recent"),
        reload=True,
        switch=True,
    )


def subject() -> Subject:
    return Subject(
        kind="delayed",
        layer=_layer,
        autocast=_autocast,
        checkpoint=_checkpoint,
        backward=_backward,
        state=_state,
        pending=delayed.pending,
        reset=delayed.reset,
        listen=_listen,
        policy=policy,
        load=_load,
    )


def policy(settings: Settings) -> Policy:
    """The recipe's rules: every backward pass commits what it staged, and nothing else moves."""
    scaling = _scaling(settings)
    return Policy(
        settings.history,
        scaling.algorithm,
        scaling.margin,
        scaling.forward,
        scaling.backward,
        rolls_on_zero=not scaling.fused,
    )


def _scaling(settings: Settings) -> DelayedScaling:
    assert settings.algorithm != "callable"
    return DelayedScaling(
        settings.history,
        settings.algorithm,
        settings.margin,
        "e4m3",
        "e5m2" if settings.format == "hybrid" else "e4m3",
        fused=settings.fused,
    )


def _layer(spec: Spec) -> nn.Module:
    assert spec.schedule is not None
    return DelayedLinear(
        spec.k,
        spec.k,
        bias=spec.bias,
        dtype=_DTYPES[spec.dtype],
        history=spec.schedule.settings.history,
    )


def _autocast(settings: Settings | None) -> AbstractContextManager[None]:
    return delayed.autocast(None if settings is None else _scaling(settings))


def _checkpoint(function: Any, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return delayed.checkpoint(function, x, use_reentrant=reentrant)


def _backward(outputs: list[torch.Tensor], grads: list[torch.Tensor], retain: bool) -> None:
    delayed.backward(outputs, grads, retain_graph=retain)


def _state(layers: Mapping[str, nn.Module]) -> dict[SlotName, Slot]:
    found: dict[SlotName, Slot] = {}
    for name, layer in layers.items():
        for direction in _DIRECTIONS:
            window = getattr(layer, f"{direction}_window").numpy()
            scale = getattr(layer, f"{direction}_scale").numpy()
            for i in range(len(scale)):
                slot = Slot(scale[i].copy(), window[:, i].copy())
                found[SlotName(name, direction, i)] = slot
    return found


@contextmanager
def _listen(layers: Mapping[str, nn.Module], listener: Listener) -> Iterator[None]:
    names = {id(layer): name for name, layer in layers.items()}

    def hear(seen: delayed.Cast | delayed.Product) -> None:
        if isinstance(seen, delayed.Cast):
            slot = SlotName(names[id(seen.layer)], seen.direction, seen.slot)
            listener(RawCast(slot, seen.input, seen.codes, seen.scale, seen.format))
        else:
            a, b = (_side(*pair) for pair in ((seen.a, seen.a_scale), (seen.b, seen.b_scale)))
            listener(RawProduct(seen.role, a, b))

    with delayed.listening(hear):
        yield


def _side(codes: torch.Tensor, scale: torch.Tensor) -> RawSide:
    kind = "e4m3" if codes.dtype == torch.float8_e4m3fn else "e5m2"
    return RawSide(codes, 1.0 / scale, kind)


def _load(layers: nn.Module, state: dict[str, Any]) -> None:
    for name, layer in layers.named_children():
        assert isinstance(layer, DelayedLinear)
        layer.resize(len(state[f"{name}.forward_window"]))
    layers.load_state_dict(state)
