"""Which deviations made a difference: the moves of an event on slots, with and without each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from narrowfuzz.rules.state.outcome import outcome
from narrowfuzz.rules.state.plan import Commit, Move, Plan
from narrowfuzz.rules.state.run import Deviations
from narrowfuzz.trace.snapshots import SlotName

_RULE: Deviations = frozenset()


def followed(
    event: int, plan: Plan, under: Callable[[Deviations], Plan], deviations: Deviations
) -> Mapping[str, frozenset[str]]:
    """Deviation -> the differences that it made, in words. Empty if all deviations together do not
    change the event's moves. Else these are the deviations without which the moves would be others;
    if there are none, because each of several suffices, those that suffice by themselves. A move
    by an algorithm of another name is another move, even if its effect is the same. ``under`` plans
    the event under some deviations; ``plan`` is the result under all of them."""
    if not deviations or plan.moves == (rule := under(_RULE)).moves:
        return {}
    found = {one: _differences(event, plan, under(deviations - {one})) for one in deviations}
    if not any(found.values()) and (changed := _changed(plan, rule)):
        one_each = {one: under(frozenset({one})) for one in deviations}
        found = {
            one: _differences(event, like, rule)
            for one, like in one_each.items()
            if changed - _changed(plan, like)
        }
    return {one: differences for one, differences in found.items() if differences}


def _changed(plan: Plan, other: Plan) -> set[SlotName]:
    """Slots that the event changes otherwise, or by an algorithm of another name."""
    here, there = plan.moves, other.moves
    slots = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    return {
        name
        for name in slots
        if _algorithms(plan, other, name) or _done(plan, name) != _done(other, name)
    }


def _done(plan: Plan, name: SlotName) -> tuple[Move, ...]:
    return outcome(plan.slots.get(name), plan.moves.get(name, ())).done


def _differences(event: int, plan: Plan, other: Plan) -> frozenset[str]:
    """Words for the differences: the event, and for updates by another algorithm also the layer and
    the algorithm. Empty if there is none."""
    changed = _changed(plan, other)
    algorithms = {
        f"{event} {name.layer} {algorithm}"
        for name in changed
        for algorithm in _algorithms(plan, other, name)
    }
    return frozenset(algorithms or ({str(event)} if changed else ()))


def _algorithms(plan: Plan, other: Plan, name: SlotName) -> list[str]:
    """The algorithms by which ``plan`` updates a slot where ``other`` does it by another one."""
    return [
        move.algorithm
        for move, instead in zip(plan.moves.get(name, ()), other.moves.get(name, ()), strict=False)
        if isinstance(move, Commit) and isinstance(instead, Commit)
        if move.algorithm != instead.algorithm
    ]
