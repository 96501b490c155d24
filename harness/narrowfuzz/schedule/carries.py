"""What of a schedule a recipe's subject can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowfuzz.schedule.events import (
    Algorithm,
    Backward,
    Forward,
    LayerKind,
    Layout,
    Reload,
    Schedule,
    Settings,
    Switch,
)


@dataclass(frozen=True)
class Carries:
    """What a recipe's subject can do; of several values the first is the simplest."""

    layers: tuple[LayerKind, ...] = ("linear",)
    layouts: tuple[Layout, ...] = ("chain",)
    #: Pairs of ``checkpoint_by`` and ``reentrant``.
    checkpoints: tuple[tuple[Literal["library", "torch"], bool], ...] = ()
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
    #: A graph that is kept can be run backward again.
    keeps_graphs: bool = True


def check_carried(schedule: Schedule, carries: Carries, recipe: str) -> None:
    """Raise ValueError naming the first thing of a schedule that the recipe cannot do here."""
    settings, events = schedule.settings, schedule.events
    by = (schedule.checkpoint_by, schedule.reentrant)
    algorithms = {settings.algorithm} | {
        e.algorithm for e in events if isinstance(e, Switch) and e.algorithm
    }
    lacking = {
        f"layer {schedule.layer!r}": schedule.layer not in carries.layers,
        f"layout {schedule.layout!r}": schedule.layout not in carries.layouts,
        f"a checkpoint by {by[0]}{', reentrant' if by[1] else ''}": (
            schedule.checkpoint != "none" and by not in carries.checkpoints
        ),
        "is_first_microbatch": not carries.caching
        and any(isinstance(e, Forward) and e.first is not None for e in events),
        "parameters made in FP8": schedule.quantized_init and not carries.quantized_init,
        "settings": settings != Settings() and not carries.settings,
        f"algorithm {' and '.join(sorted(algorithms))}": not algorithms <= set(carries.algorithms),
        "the unfused update": not settings.fused and not carries.unfused,
        "a reload": not carries.reload and any(isinstance(e, Reload) for e in events),
        "a kept graph": not carries.keeps_graphs
        and any(isinstance(e, Backward) and e.retain for e in events),
        "a rollback": any(isinstance(e, Reload) and e.back for e in events),
        "inference mode": any(isinstance(e, Forward) and e.mode == "inference" for e in events),
        "a switch": not carries.switch and any(isinstance(e, Switch) for e in events),
    }
    for what, missing in lacking.items():
        if missing:
            raise ValueError(
                f"{recipe} does not carry {what} here (layers: {', '.join(carries.layers)})"
            )
