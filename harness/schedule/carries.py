"""What of a schedule a recipe's subject can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.schedule.events import Algorithm, LayerKind, Layout


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
