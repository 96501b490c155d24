"""What the fold needs to know of a run besides its events, collected in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from narrowfuzz.case.events import Event, Layout, Settings, Wraps
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.models.catalog import LAYERS
from narrowfuzz.numerics.delayed import FMAX, Policy
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import Progress
from narrowfuzz.trace.snapshots import Direction, Moment

#: As-built deviations that hold, by name.
Deviations = frozenset[str]


def by_library(arm: str) -> bool:
    """Does this arm use the library's own checkpoint? The library knows nothing of others."""
    return BY_NAME[arm].checkpoint in ("full", "reentrant")


@dataclass(frozen=True)
class Run:
    """What is constant during one arm's run of a training."""

    arm: str
    #: The recipe's rules under these settings; None in high precision.
    policy: Callable[[Settings], Policy | None]
    #: The number of cells with which a window begins.
    history: int
    #: Of layers that are recomputed together, only the first updates.
    updates_once: bool = False
    layout: Layout = "chain"
    #: Layer calls of one forward.
    calls: int = 1
    checkpoint: Literal["none"] | Wraps = "none"
    #: Parameters are made in the narrow format.
    quantized_init: bool = False

    @property
    def by_library(self) -> bool:
        """The library's own checkpoint recomputes."""
        return by_library(self.arm)

    @property
    def graphless(self) -> bool:
        """A checkpointed forward builds no graph: its layers build one when they are recomputed."""
        return BY_NAME[self.arm].checkpoint in ("reentrant", "by_torch_reentrant")

    @property
    def each(self) -> bool:
        """Each layer call is checkpointed by itself."""
        return self.checkpoint in ("each", "nested")

    @property
    def grouped(self) -> bool:
        """Of the layers recomputed together, only the first updates: unlike other layers,
        GroupedLinear does not restore whether it is to update."""
        return self.updates_once and self.checkpoint == "whole"

    def update(self, direction: Direction, settings: Settings) -> tuple[Policy, np.float32]:
        """The policy of an update under these settings, and the largest value of its format."""
        policy = self.policy(settings)
        assert policy is not None  # nothing is staged without one
        return policy, FMAX[policy.forward if direction == "forward" else policy.backward]


@dataclass(frozen=True)
class Now:
    """An event of a run: the progress before it, what was observed of it, and the deviations that
    hold."""

    run: Run
    event: Event
    progress: Progress
    seen: Moment
    deviations: Deviations


def run_of(evidence: Evidence, arm: str) -> Run:
    """The run of one arm of the evidence."""
    spec = evidence.spec
    return Run(
        arm=arm,
        policy=evidence.own_layers.policy,
        history=spec.settings.history,
        updates_once=LAYERS[spec.model].updates_once,
        layout=spec.layout,
        calls=spec.calls,
        checkpoint=spec.region,
        quantized_init=spec.quantized_init,
    )
