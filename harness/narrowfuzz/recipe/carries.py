"""What of a schedule the layers that a recipe brings support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from narrowfuzz.case.events import (
    Algorithm,
    Backward,
    Forward,
    Layout,
    Reload,
    Settings,
    Switch,
)
from narrowfuzz.case.spec import AnyCheckpoint, Sharding, Spec


@dataclass(frozen=True)
class Carries:
    """What a recipe's subject can do; of several values the first is the simplest."""

    layers: tuple[str, ...] = ("linear",)
    layouts: tuple[Layout, ...] = ("chain",)
    checkpoints: tuple[AnyCheckpoint, ...] = ()
    #: Weights cast for one microbatch can serve the next.
    caching: bool = False
    quantized_init: bool = False
    #: There are a history and a margin to set.
    settings: bool = False
    algorithms: tuple[Algorithm, ...] = ("max",)
    #: The tensor by tensor update can be chosen.
    unfused: bool = False
    reload: bool = False
    #: Settings may change between regions; needs ``settings``.
    switch: bool = False
    #: Ranks that train on rows of their own may share their maxima.
    ranks: bool = False
    #: A graph that is kept can be run backward again.
    keeps_graphs: bool = True

    def __post_init__(self) -> None:
        known = get_args(AnyCheckpoint)
        for checkpoint in self.checkpoints:
            if checkpoint not in known:
                raise ValueError(
                    f"checkpoints of Carries has {checkpoint!r}: known are {', '.join(known)}"
                )


def check_carried(spec: Spec, carries: Carries) -> None:
    """Raise ValueError naming the first thing of a Spec that its recipe cannot do here."""
    settings, events = spec.settings, spec.training
    algorithms = {settings.algorithm} | {
        e.algorithm for e in events if isinstance(e, Switch) and e.algorithm
    }
    lacking = {
        f"model {spec.model!r}": spec.layer not in carries.layers,
        f"layout {spec.layout!r}": spec.layout not in carries.layouts,
        f"checkpoint {spec.checkpoint!r}": spec.checkpoint not in ("none", *carries.checkpoints),
        "is_first_microbatch": not carries.caching
        and any(isinstance(e, Forward) and e.first is not None for e in events),
        "parameters made in FP8": spec.quantized_init and not carries.quantized_init,
        "settings": settings != Settings() and not carries.settings,
        f"algorithm {' and '.join(sorted(algorithms))}": not algorithms <= set(carries.algorithms),
        "the unfused update": not settings.fused and not carries.unfused,
        "a reload": not carries.reload and any(isinstance(e, Reload) for e in events),
        "a kept graph": not carries.keeps_graphs
        and any(isinstance(e, Backward) and e.retain for e in events),
        "a rollback": any(isinstance(e, Reload) and e.back for e in events),
        "inference mode": any(isinstance(e, Forward) and e.mode == "inference" for e in events),
        f"ranks ({spec.sharding})": spec.sharding
        != Sharding(data=spec.sharding.data * carries.ranks),
        f"reduces {settings.reduces!r} in one process": not spec.sharded
        and settings.reduces != "all",
        "a switch": not carries.switch and any(isinstance(e, Switch) for e in events),
    }
    for what, missing in lacking.items():
        if missing:
            models = ", ".join(f"library_{layer}" for layer in carries.layers)
            raise ValueError(f"{spec.recipe} does not carry {what} here (models: {models})")
