"""A library's book-keeping of its regions and layers, as far as its deviations depend on it.

TransformerEngine keeps all of this. It is recorded whether or not a deviation holds, and read only
where one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from narrowfuzz.case.events import Algorithm, Settings
from narrowfuzz.rules.state.run import Deviations

_BY_REGION, _BY_RECOMPUTE = "inner_region_owns_update", "recompute_leaves_ownership"


@dataclass(frozen=True)
class Library:
    """A library's own book-keeping. Every method that records something returns a new record."""

    #: Layer -> settings of the first forward in FP8 since it was built or loaded.
    registered: Mapping[str, Settings] = field(default_factory=dict)
    #: (history, margin) -> algorithm of the region with these settings that was entered last.
    algorithms: Mapping[tuple[int, int], Algorithm] = field(default_factory=dict)
    #: Layers of the model whose last forward ran in high precision.
    high: frozenset[str] = frozenset()
    #: Does the backward of the next training forward update gradients?
    owns_next: bool = False
    #: The deviation by which it does.
    next_by: str = _BY_REGION
    #: The value of ``owns_next`` when each open region was entered.
    saved: tuple[bool, ...] = ()
    #: Forward whose backward updates gradients -> the deviation by which it does.
    owners: Mapping[int, str] = field(default_factory=dict)

    def entered(self, settings: Settings | None) -> Library:
        """After a region was opened; ``settings`` None: in high precision."""
        noted = replace(self, saved=(*self.saved, self.owns_next))
        if not self.saved:
            noted = replace(noted, owns_next=True, next_by=_BY_REGION)
        return noted if settings is None else noted.chose(settings)

    def chose(self, settings: Settings) -> Library:
        """After a region was opened under these settings, possibly by a recompute."""
        chosen = {(settings.history, settings.margin): settings.algorithm}
        return replace(self, algorithms={**self.algorithms, **chosen})

    def left(self) -> Library:
        """After a region was closed, which restores the ``owns_next`` from before it."""
        return replace(self, owns_next=self.saved[-1], saved=self.saved[:-1])

    def trained(self, forward: int) -> Library:
        """After a training forward ran in FP8."""
        owners = {**self.owners, forward: self.next_by} if self.owns_next else self.owners
        return replace(self, owners=owners, owns_next=False)

    def recomputed(self, owned: bool) -> Library:
        """After a recompute, which sets ``owns_next`` to its value when its segment first ran."""
        if owned == self.owns_next:
            return self
        return replace(self, owns_next=owned, next_by=_BY_RECOMPUTE)

    def called(self, layer: str, settings: Settings | None) -> Library:
        """After a layer of the model ran a forward under these settings, None: high precision."""
        if (settings is None) == (layer in self.high):
            return self
        return replace(self, high=self.high ^ {layer})

    def quantised(self, layer: str, settings: Settings) -> Library:
        """After a part of a layer quantised something in a forward."""
        if layer in self.registered:
            return self
        return replace(self, registered={**self.registered, layer: settings})

    def settings(self, layer: str, settings: Settings, deviations: Deviations) -> Settings:
        """The settings that an update uses for a slot that was staged under ``settings``."""
        first = self.registered.get(layer, settings)
        if "margin_of_first_forward" in deviations and first.margin != settings.margin:
            settings = msgspec.structs.replace(settings, margin=first.margin)
        if "algorithm_of_last_region" in deviations:
            key = first.history, first.margin
            latest = self.algorithms.get(key, settings.algorithm)
            if latest != settings.algorithm:
                settings = msgspec.structs.replace(settings, algorithm=latest)
        return settings

    def updates(self, of: tuple[int, ...], rule: bool, deviations: Deviations) -> bool:
        """Does a backward through these forwards update gradients? ``rule`` is the answer by the
        rule, which holds unless a deviation decides."""
        by = {self.owners[f] for f in of if f in self.owners}
        deviation = next(iter(by)) if len(by) == 1 else _BY_REGION
        return bool(by) if deviation in deviations else rule
