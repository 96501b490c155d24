"""The plan of an event, made before any number is computed: which maxima are staged, and which
scales are updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from narrowfuzz.case.events import Algorithm, Settings
from narrowfuzz.numerics.delayed import Policy, Slot
from narrowfuzz.rules.state.library import Library
from narrowfuzz.rules.state.run import Deviations, Now
from narrowfuzz.trace.snapshots import CastSeen, Direction, SlotName


class Begin(NamedTuple):
    """A slot exists for the first time."""

    history: int


class Resize(NamedTuple):
    """A window gets another length: at its oldest end, or by a deviation ``cut`` at its newest."""

    history: int
    cut: bool


class Quantise(NamedTuple):
    """A tensor is quantised with the slot's scale; its maximum is staged or not."""

    #: Number of the cast within the event.
    number: int
    scale: np.float32 | None
    amax: np.float32
    stages: bool


class Commit(NamedTuple):
    """An update."""

    policy: Policy
    #: Largest value of the slot's format.
    largest: np.float32
    #: The recipe's name of the algorithm: several names may have the same policy.
    algorithm: Algorithm
    #: True: nothing is staged.
    idle: bool
    #: The update counts only if it leads to this state; None: in any case.
    only: Slot | None = None


class Lose(NamedTuple):
    """A model was loaded without the slot's state."""


Move = Begin | Resize | Quantise | Commit | Lose


#: The number of a cast within its event, and the cast.
Numbered = tuple[int, CastSeen]


@dataclass(frozen=True)
class Plan:
    """The moves of one event on every slot, in order, and what remains to be updated after it."""

    #: The slots before the event.
    slots: Mapping[SlotName, Slot]
    #: Slots with which the schedule has quantised so far: it did not set the scales of others.
    ran: frozenset[SlotName]
    #: Slot with a maximum staged since its last commit -> the settings that it was staged under.
    waiting: Mapping[SlotName, Settings]
    library: Library
    moves: Mapping[SlotName, tuple[Move, ...]]


def quantise(
    plan: Plan,
    casts: Iterable[Numbered],
    settings: Settings,
    policy: Policy,
    now: Now,
    *,
    stages: bool,
) -> Plan:
    """The plan with these casts, all under one policy. A forward gives all windows of its layer the
    length of its recipe."""
    moves, waiting, library = dict(plan.moves), dict(plan.waiting), plan.library
    cut = "window_resized_at_its_newest_end" in now.deviations
    seen_layers: set[str] = set()
    ran: set[SlotName] = set()
    for number, cast in casts:
        name = cast.slot
        assert name is not None
        if cast.at.phase == "forward" and name.layer not in seen_layers:
            seen_layers.add(name.layer)
            library = library.quantised(name.layer, settings)
            for other, slot in plan.slots.items():
                if other.layer == name.layer:
                    owed = moves.get(other, ())
                    if _length(slot, owed) != policy.history:
                        moves[other] = (*owed, Resize(policy.history, cut))
        owed = moves.get(name, ())
        if name not in plan.slots and not owed:
            owed = (Begin(policy.history),)
        moves[name] = (*owed, Quantise(number, cast.scale, cast.amax, stages))
        ran.add(name)
        if stages:
            waiting[name] = settings
    return replace(plan, ran=plan.ran | ran, waiting=waiting, library=library, moves=moves)


def _length(slot: Slot, moves: tuple[Move, ...]) -> int:
    """The length of a slot's window after these moves."""
    lengths = [move.history for move in moves if isinstance(move, Begin | Resize)]
    return lengths[-1] if lengths else len(slot.window)


def commit(
    plan: Plan, direction: Direction, now: Now, observed: Mapping[SlotName, Slot] | None = None
) -> Plan:
    """The plan with an update of what is staged in one direction; with ``observed`` an update
    counts only if it leads to the observed state."""
    moves, waiting, library = dict(plan.moves), dict(plan.waiting), plan.library
    deviations, rolls = now.deviations, "idle_windows_roll" in now.deviations
    for name in {**plan.slots, **plan.moves}:
        if name.direction != direction:
            continue
        settings, first = waiting.get(name), library.registered.get(name.layer)
        idle = settings is None
        if first is None and "loaded_layers_wait" in deviations:
            continue
        if settings is None:
            if first is None or not rolls:
                continue
            settings = first
        settings = library.settings(name.layer, settings, deviations)
        policy, largest = now.run.update(direction, settings)
        only = None
        if observed is None:
            waiting.pop(name, None)
        elif name in observed and name in plan.ran:
            only = observed[name]
        else:
            continue
        update = Commit(policy, largest, settings.algorithm, idle, only)
        moves[name] = (*moves.get(name, ()), update)
    return replace(plan, waiting=waiting, moves=moves)


def lose(plan: Plan, deviations: Deviations) -> Plan:
    """The plan of a save and load of the model: a layer that is saved without its state begins
    anew."""
    if "saved_after_fp8_only" not in deviations:
        return plan
    high = plan.library.high
    lost = {name for name in plan.slots if name.layer.split(".")[0] in high}
    return replace(
        plan,
        ran=plan.ran - lost,
        waiting={name: under for name, under in plan.waiting.items() if name not in lost},
        moves=dict.fromkeys(lost, (Lose(),)),
    )
