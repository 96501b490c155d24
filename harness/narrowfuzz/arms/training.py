"""A Spec as the player takes it: its events, and the other arguments of making and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from narrowfuzz.arms.ladder import options_on
from narrowfuzz.arms.zoo import ties
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.events import (
    Backward,
    Close,
    Forward,
    Open,
    Reload,
    Settings,
    Step,
    Switch,
    with_settings,
)
from narrowfuzz.case.spec import LEARNING_RATE, Spec
from narrowfuzz.models.catalog import MODELS, takes_ids
from narrowfuzz.play import library, player

T = TypeVar("T")
#: How a model calls a single linear's parameters, and their gradients.
OF_LINEAR = {"weight": "proj.weight", "bias": "proj.bias"}
GRADIENTS = {"grad_weight": "proj.weight.grad", "grad_bias": "proj.bias.grad"}
#: What a relation may let happen to a program, with which the same data must leave the same.
AFTER: dict[str, tuple[player.Event, ...]] = {
    "steps": (
        ("forward", 0, 0, "train", False), ("backward", 0, (0,), False), ("step", True),
        ("forward", 1, 0, "train", False), ("backward", 1, (1,), False), ("step", False),
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
    """One event of the player for each of the Spec's."""
    return tuple(_events(spec))


def _events(spec: Spec) -> Iterator[player.Event]:
    forwards = backwards = turn = steps = 0
    for event, used in with_settings(spec.training, spec.settings):
        # a library's layers are handed their settings, a converted model has them
        handed = (plain(used),) if spec.layer else ()
        match event:
            case Open(enabled=enabled):
                yield "open", (*handed, True)[0] if enabled else None
            case Close():
                yield ("close",)
            case Forward(mode=mode, inside=inside):
                narrow = not handed and (spec.autocast or inside)
                yield "forward", forwards, turn, mode, narrow
                forwards += 1
                # each microbatch of a model is the same rows, turned by one more; who only looks
                # turns none
                turn += mode == "train" and not handed
            case Backward(of=of, retain=retain):
                yield "backward", backwards, of, retain
                backwards += 1
            case Step():
                yield "step", True
                if spec.sharding.resumes and not steps:
                    yield ("handover",)
                steps += 1
            case Reload(back=back):
                yield ("rollback",) if back else ("reload", False, *handed)
            case Switch():
                yield ("switch",)


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
    narrow = [how[-1] for event, *how in events if event in ("open", "forward")]
    return {
        "happens": tuple(dict.fromkeys(event for event, *_ in events)),
        "modes": tuple(dict.fromkeys(how[2] for event, *how in events if event == "forward")),
        "device": device,
        "input_shape": spec.input_shape,
        "output_shape": spec.output_shape,
        "ids": takes_ids(spec.model),
        "input_grad": spec.layout != "frozen_first",
        "optimizer": (_OPTIMIZER[spec.optimizer] if own else "SGD") if steps else "",
        "rate": LEARNING_RATE[spec.optimizer] if steps and own else 0.0,
        "autocast": True in narrow,
        "input_layout": spec.input_layout,
        "grad_layout": spec.grad_layout,
    }


_OPTIMIZER = {"sgd": "SGD", "adamw": "AdamW"}


def plain(settings: Settings) -> library.Settings:
    """The settings as the player hands them to a library's verbs."""
    return library.Settings(*(getattr(settings, name) for name in library.Settings._fields))


def calling(spec: Spec, *, caching: bool) -> dict[str, Any]:
    """What ``training_of`` takes by keyword, but for the subject, what happens, who listens, and
    whether anything is recomputed; ``caching`` says whether layers take
    ``is_first_microbatch``."""
    names = [str(i) for i in range(spec.layers)]
    return {
        "hows": _hows(spec),
        "order": tuple(names * 2 if spec.layout == "twice" else names),
        "layout": spec.layout,
        "frozen": spec.layout == "frozen_first",
        "each": spec.region in ("each", "nested"),
        "whole": spec.region in ("whole", "nested"),
        "by": spec.checkpoint_by,
        "reentrant": spec.reentrant,
        "caching": caching,
    }


def _hows(spec: Spec) -> dict[int, dict[str, Any]]:
    """How each forward calls a library's layers, by its number."""
    events = with_settings(spec.training, spec.settings)
    forwards = [(event, used) for event, used in events if isinstance(event, Forward)]
    return {
        number: {
            "inside": plain(used) if event.inside else None,
            "first": event.first,
            "path": event.path,
        }
        for number, (event, used) in enumerate(forwards)
    }
