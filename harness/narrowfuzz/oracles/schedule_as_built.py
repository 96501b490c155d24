"""What a library does with its scaling state where it departs from the rules.

The state machine asks here before it updates a slot. Without a deviation from the ledger every
answer is the rule's; with one it is what the library is known to do, and the entry is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from narrowfuzz.moments import SlotName
from narrowfuzz.numerics.delayed import Slot, cut, fresh, resized
from narrowfuzz.schedule.events import Algorithm, Settings


@dataclass
class AsBuilt:
    """The library's book-keeping, as far as its deviations depend on it."""

    #: As-built deviation -> ledger entry.
    deviations: Mapping[str, str]
    #: The event that is followed now.
    event: int = -1
    #: Entries whose deviation made a difference, and where: the event, and which difference.
    followed: dict[str, set[str]] = field(default_factory=dict)
    #: Layer -> settings of the first forward in FP8 since it was built or loaded.
    registered: dict[str, Settings] = field(default_factory=dict)
    #: History and margin of a region -> algorithm of the one entered last.
    algorithms: dict[tuple[int, int], Algorithm] = field(default_factory=dict)
    #: Layers of the model whose last forward ran in high precision.
    high: set[str] = field(default_factory=set)
    #: Is the next training forward told to update gradients?
    first: bool = False
    #: The deviation that tells it so, if it is one.
    first_by: str = "inner_region_owns_update"
    #: The same, as each open region found it.
    saved: list[bool] = field(default_factory=list)
    #: Forwards whose backward updates gradients, and the deviation by which it does.
    owners: dict[int, str] = field(default_factory=dict)

    def follows(self, deviation: str, *, differs: bool = True, what: str = "") -> bool:
        """True if the ledger has this deviation; counted where it makes a difference, ``what``."""
        entry = self.deviations.get(deviation, "")
        if entry and differs:
            self.followed.setdefault(entry, set()).add(f"{self.event} {what}".strip())
        return bool(entry)

    def entered(self, settings: Settings | None) -> None:
        """A region was opened; None: in high precision."""
        self.saved.append(self.first)
        if len(self.saved) == 1:
            self.first, self.first_by = True, "inner_region_owns_update"
        if settings is not None:
            self.chose(settings)

    def chose(self, settings: Settings) -> None:
        """A region was opened under these settings, if only by a recompute."""
        self.algorithms[settings.history, settings.margin] = settings.algorithm

    def left(self) -> None:
        """A region was closed. An inner one restores what it found."""
        self.first = self.saved.pop()

    def trained(self, forward: int) -> None:
        """A training forward ran in FP8."""
        if self.first:
            self.owners[forward] = self.first_by
        self.first = False

    def recomputed(self, first: bool) -> None:
        """A recompute leaves behind what its forward was told."""
        by = "recompute_leaves_ownership"
        if self.follows(by, differs=False) and first != self.first:
            self.first, self.first_by = first, by

    def updates(self, of: tuple[int, ...], rule: bool) -> bool:
        """Does a backward through these forwards update gradients, as the rule says it does?"""
        by = {self.owners[f] for f in of if f in self.owners}
        deviation = by.pop() if len(by) == 1 else "inner_region_owns_update"
        owned = bool(self.owners.keys() & set(of))
        return owned if self.follows(deviation, differs=owned != rule) else rule

    def called(self, layer: str, settings: Settings | None) -> None:
        """A layer of the model ran a forward under these settings."""
        if settings is None:
            self.high.add(layer)
        else:
            self.high.discard(layer)

    def ran(self, layer: str, settings: Settings) -> None:
        """A part of a layer quantised something in a forward."""
        self.registered.setdefault(layer, settings)

    def settings(self, layer: str, settings: Settings) -> Settings:
        """What an update of a slot staged under ``settings`` goes by."""
        first = self.registered.get(layer, settings)
        if self.follows("margin_of_first_forward", differs=first.margin != settings.margin):
            settings = msgspec.structs.replace(settings, margin=first.margin)
        latest = self.algorithms.get((first.history, first.margin), settings.algorithm)
        what = f"{layer} {latest}"
        if self.follows(
            "algorithm_of_last_region", differs=latest != settings.algorithm, what=what
        ):
            settings = msgspec.structs.replace(settings, algorithm=latest)
        return settings

    def resized(self, slot: Slot, history: int) -> Slot:
        """The slot under another window length."""
        rule, other = resized(slot, history), cut(slot, history)
        wrong = self.follows("window_resized_at_its_newest_end", differs=not rule.equals(other))
        return other if wrong else rule

    def reloaded(self, slots: dict[SlotName, Slot]) -> set[SlotName]:
        """The model was saved and loaded: the slots that were lost, now as if never seen."""
        self.registered.clear()
        lost = {name for name in slots if name.layer.split(".")[0] in self.high}
        known = {name for name in lost if not slots[name].equals(fresh(len(slots[name].window)))}
        if not self.follows("saved_after_fp8_only", differs=bool(known)):
            return set()
        for name in lost:
            slots[name] = fresh(len(slots[name].window))
        return lost
