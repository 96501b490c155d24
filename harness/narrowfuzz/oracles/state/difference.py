"""Which deviations made a difference: what slots owe to an event, with and without each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from narrowfuzz.oracles.state.outcome import outcome
from narrowfuzz.oracles.state.plan import Commit, Move, Plan
from narrowfuzz.oracles.state.run import Deviations

_RULE: Deviations = frozenset()


def followed(
    event: int, plan: Plan, under: Callable[[Deviations], Plan], deviations: Deviations
) -> Mapping[str, frozenset[str]]:
    """Deviation -> its differences: where all of them together change what the event does to some
    slot, those without which it would be something else. ``under`` plans the event; ``plan`` is
    what it is under all ``deviations``. Where each of several would do alone, they are those."""
    if not deviations or not _differences(event, plan, rule := under(_RULE)):
        return {}
    found = {one: _differences(event, plan, under(deviations - {one})) for one in deviations}
    if not any(found.values()):
        found = {one: _differences(event, under(frozenset({one})), rule) for one in deviations}
    return {one: differences for one, differences in found.items() if differences}


def _differences(event: int, plan: Plan, other: Plan) -> frozenset[str]:
    """The event, and where an update goes by another algorithm the layer and that algorithm."""
    if plan.moves == other.moves:
        return frozenset()
    differ, algorithms = False, set()
    for name in plan.moves.keys() | other.moves.keys():
        here, there = plan.moves.get(name, ()), other.moves.get(name, ())
        if here == there:
            continue
        slot = plan.slots.get(name)
        if outcome(slot, here).done == outcome(slot, there).done:
            continue
        differ = True
        algorithms |= {f"{event} {name.layer} {x}" for x in _algorithms(here, there)}
    return frozenset(algorithms or ({str(event)} if differ else ()))


def _algorithms(moves: tuple[Move, ...], instead: tuple[Move, ...]) -> list[str]:
    """By which algorithm a slot is updated where it would be by another."""
    return [
        move.algorithm
        for move, other in zip(moves, instead, strict=False)
        if isinstance(move, Commit) and isinstance(other, Commit)
        if move.algorithm != other.algorithm
    ]
