"""A Spec as the player takes it: its events, and the other arguments of making and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from narrowfuzz.arm import Arm
from narrowfuzz.arms.ladder import options_on
from narrowfuzz.case import LEARNING_RATE, Spec
from narrowfuzz.catalog import MODELS
from narrowfuzz.models.zoo import ties
from narrowfuzz.play import player
from narrowfuzz.schedule.events import Backward, Close, Forward, Open, Reload, Step

T = TypeVar("T")
#: How a model calls a single linear's parameters, and their gradients.
OF_LINEAR = {"weight": "proj.weight", "bias": "proj.bias"}
GRADIENTS = {"grad_weight": "proj.weight.grad", "grad_bias": "proj.bias.grad"}
#: What a relation may let happen to a program, with which the same data must leave the same.
AFTER: dict[str, tuple[player.Event, ...]] = {
    "steps": (
        ("forward", 0, 0, "train", False), ("backward", 0, (0,), False), ("step",), ("clear", True),
        ("forward", 1, 0, "train", False), ("backward", 1, (1,), False), ("step",),
        ("clear", False),
        ("forward", 2, 0, "train", False), ("backward", 2, (2,), False),
    ),
    "reload": (
        ("forward", 0, 0, "train", False), ("backward", 0, (0,), False), ("reload", True),
        ("forward", 1, 0, "train", False), ("backward", 1, (1,), False),
    ),
    "reload_trusted": (
        ("forward", 0, 0, "train", False), ("backward", 0, (0,), False), ("reload", False),
        ("forward", 1, 0, "train", False), ("backward", 1, (1,), False),
    ),
}  # fmt: skip


def named(spec: Spec, tensors: Mapping[str, T]) -> Mapping[str, T]:
    """The tensors with a single linear's parameters called as in its model."""
    if not spec.direct:
        return tensors
    return {OF_LINEAR.get(name, name): t for name, t in tensors.items()}


def events_of(spec: Spec) -> tuple[player.Event, ...]:
    """One event of the player for each of the Spec's, and between steps the gradients go."""
    return tuple(_events(spec))


def _events(spec: Spec) -> Iterator[player.Event]:
    forwards = backwards = turn = 0
    stepped = False
    for event in spec.training:
        looks = isinstance(event, Open | Close) or (
            isinstance(event, Forward) and event.mode != "train"
        )
        if stepped and not looks:
            yield "clear", True
            stepped = False
        match event:
            case Open(enabled=enabled):
                yield "open", enabled
            case Close():
                yield ("close",)
            case Forward(mode=mode, inside=inside):
                # every microbatch is the same rows, turned by one more; who only looks turns none
                yield "forward", forwards, turn, mode, spec.autocast or inside
                forwards, turn = forwards + 1, turn + (mode == "train")
            case Backward(of=of, retain=retain):
                yield "backward", backwards, of, retain
                backwards += 1
            case Step():
                yield ("step",)
                stepped = True
            case Reload(back=back):
                yield ("rollback",) if back else ("reload", False)


def playing(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What ``play`` takes by keyword, but for the dtype and whom it watches."""
    return {
        **training(spec, device),
        **making(spec, arm, device),
        "tied": ties(spec),
        "lifecycle": spec.lifecycle,
        "kernels": "native" if arm.native else "default",
    }


def making(spec: Spec, arm: Arm, device: str) -> dict[str, Any]:
    """What ``called`` takes by keyword, but for whom it watches."""
    model = MODELS[spec.model]
    options = options_on(arm, device)
    if arm.compiler == "inductor" and model.random:
        options["fallback_random"] = True  # eager's numbers, else no two arms agree
    regions, whole = model.recomputed(spec)
    compile_with = {"dynamic": spec.dynamic, "fullgraph": spec.fullgraph, "options": options}
    return {
        "checkpoint": arm.checkpoint,
        "regions": regions,
        "whole": whole,
        "compiler": arm.compiler,
        "compile_with": {k: v for k, v in compile_with.items() if v != {}} if arm.compiler else {},
        "memory_budget": spec.memory_budget / 100 if arm.compiler else 1.0,
    }


def training(
    spec: Spec, device: str, events: tuple[player.Event, ...] | None = None
) -> dict[str, Any]:
    """What ``train`` takes by keyword, but for the dtype. Of other ``events`` than the Spec's, the
    optimizer's steps change nothing."""
    own = events is None
    events = events_of(spec) if events is None else events
    steps = any(event == "step" for event, *_ in events)
    return {
        "happens": tuple(dict.fromkeys(event for event, *_ in events)),
        "modes": tuple(dict.fromkeys(how[2] for event, *how in events if event == "forward")),
        "device": device,
        "input_shape": spec.input_shape,
        "output_shape": spec.output_shape,
        "ids": MODELS[spec.model].takes_ids,
        "optimizer": (_OPTIMIZER[spec.optimizer] if own else "SGD") if steps else "",
        "rate": LEARNING_RATE[spec.optimizer] if steps and own else 0.0,
        "autocast": any(
            event == "open" or (event == "forward" and how[3]) for event, *how in events
        ),
        "input_layout": spec.input_layout,
        "grad_layout": spec.grad_layout,
        "parameters": steps and own,
    }


_OPTIMIZER = {"sgd": "SGD", "adamw": "AdamW"}
