"""Which models and events the layers of a library's own, which a recipe provides, support."""

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
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import AnyCheckpoint, Spec


@dataclass(frozen=True)
class Carries:
    """The capabilities of a recipe's subject. In each tuple, the first value is the simplest."""

    layers: tuple[str, ...] = ("linear",)
    layouts: tuple[Layout, ...] = ("chain",)
    checkpoints: tuple[AnyCheckpoint, ...] = ()
    #: Weights that were cast for one microbatch can be reused for the next (is_first_microbatch).
    caching: bool = False
    #: Parameters can be created in FP8.
    quantized_init: bool = False
    #: The length of the amax history and the margin can be set.
    settings: bool = False
    algorithms: tuple[Algorithm, ...] = ("max",)
    #: The update that handles one tensor after the other can be chosen.
    unfused: bool = False
    reload: bool = False
    #: Settings may change between regions; needs ``settings``.
    switch: bool = False
    #: Data-parallel ranks may share their maxima.
    ranks: bool = False
    #: A retained graph can run backward again.
    keeps_graphs: bool = True
    #: Numbers of features and of rows that cases have, repeated by weight: rules of a state do not
    #: depend on them, but the time of a run does.
    features: tuple[int, ...] = (32, 32, 32, 16, 64)
    rows: tuple[int, ...] = (32, 32, 16)

    def __post_init__(self) -> None:
        known = get_args(AnyCheckpoint)
        for checkpoint in self.checkpoints:
            if checkpoint not in known:
                raise ValueError(
                    f"checkpoints of Carries has {checkpoint!r}: known are {', '.join(known)}"
                )


def check_carried(spec: Spec, carries: Carries) -> None:
    """Raise ValueError naming the first property of a Spec that its recipe does not support."""
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
