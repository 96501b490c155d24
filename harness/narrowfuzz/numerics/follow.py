"""One slot's state, followed through a run by what each event owes to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from narrowfuzz.numerics.delayed import Slot, committed, cut, fresh, resized, staged

#: What a slot owes to an event, in order: ("stage",), ("commit", policy),
#: ("resize", history), ("cut", history), and ("lose",) where a reload forgets it.
Move = tuple[Any, ...]


def shared(
    held: Sequence[Sequence[Slot | None]],
    seen: Sequence[Sequence[Sequence[tuple[Any, Any]]]],
    rank: int,
) -> tuple[list[Slot | None], list[list[tuple[Any, Any]]]]:
    """What a rank's slot held after each event and what that quantised with it, but of what is
    staged, and of each maximum, the largest of all ranks."""
    slots = [
        own and staged(own, max(other.window[0] for other in slot if other))
        for slot in zip(*held, strict=True)
        for own in slot[rank : rank + 1]
    ]
    maxima = [
        [(max(amax for amax, _ in one), one[rank][1]) for one in zip(*event, strict=True)]
        for event in zip(*seen, strict=True)
    ]
    return slots, maxima


def followed(
    held: Sequence[Slot | None],
    seen: Sequence[Sequence[tuple[Any, Any]]],
    moves: Mapping[int, Sequence[Move]],
    largest: Any,
    *,
    history: int,
    kinds: Collection[str],
    scales: bool,
) -> tuple[str, bool]:
    """What the slot held after each event (None: nothing yet), against what its moves make of it;
    ``seen`` has the maximum of each tensor that an event quantised with it, and with ``scales`` the
    scale that it used. Its window begins with ``history`` cells; ``kinds`` are those of all moves.
    After a difference it goes on from what was held."""
    slot, lines, shows = fresh(history), [], False
    for event, got in enumerate(held):
        waiting, wrong, other = list(seen[event]), [], None
        for kind, *how in moves.get(event, ()):
            if "stage" in kinds and kind == "stage" and waiting:
                amax, scale = waiting.pop(0)
                if scales and scale != slot.scale:
                    wrong.append(scale)
                slot = staged(slot, amax)
            if "commit" in kinds and kind == "commit":
                # libraries divide, or multiply by a reciprocal: either will do
                turned = replace(how[0], reciprocal=not how[0].reciprocal)
                slot, other = committed(slot, how[0], largest), committed(slot, turned, largest)
            if "resize" in kinds and kind == "resize":
                slot = resized(slot, how[0])
            if "cut" in kinds and kind == "cut":
                slot = cut(slot, how[0])
            if "lose" in kinds and kind == "lose":
                slot = fresh(len(slot.window))
        if scales:  # an evaluation stages nothing
            wrong += [scale for _, scale in waiting if scale != slot.scale]
            lines += [f"event {event}: quantised with another scale, {scale}" for scale in wrong]
        got = got or fresh(len(slot.window))
        if slot.equals(fresh(len(slot.window))):  # as if never seen
            slot = fresh(len(got.window))
        slot = got if other is not None and got.equals(other) else slot
        lines.append(f"event {event}: expected {slot}\n         got      {got}")
        if wrong or not got.equals(slot):
            slot, shows = got, True
    return "\n".join(lines), shows
