"""The expected state of one slot through a run: updated by the moves of each event and compared
with the observed state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from narrowfuzz.numerics.delayed import Slot, committed, cut, fresh, resized, staged

#: One change that an event makes to a slot: ("stage",), ("commit", policy), ("resize", history),
#: ("cut", history), or ("lose",) where a reload forgets its state.
Move = tuple[Any, ...]


def with_group_maxima(
    held: Sequence[Sequence[Slot | None]],
    seen: Sequence[Sequence[Sequence[tuple[Any, Any]]]],
    rank: int,
) -> tuple[list[Slot | None], list[list[tuple[Any, Any]]]]:
    """The observations of one rank's slot where ranks share their maxima: its state after each
    event, with the largest staged maximum of all ranks, and the (maximum, scale) pairs of the
    tensors that the event quantised with it, with the largest maximum of all ranks.

    ``held``: states by rank and event; ``seen``: pairs by rank, event and tensor.
    """
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


def compare_states(
    held: Sequence[Slot | None],
    seen: Sequence[Sequence[tuple[Any, Any]]],
    moves: Mapping[int, Sequence[Move]],
    largest: Any,
    *,
    history: int,
    kinds: Collection[str],
    scales: bool,
) -> tuple[str, bool]:
    """Compare the observed states of a slot with those that its moves lead to. Returns a report
    with both for each event, and whether anything differs.

    ``held``: the observed state after each event (None: no state yet); ``seen``: for each event,
    the maximum and the scale of each tensor that it quantised with the slot; ``moves``: the moves
    of each event, in order; ``largest``: the largest finite value of the element format;
    ``history``: the initial length of the window; ``kinds``: the kinds of all moves; ``scales``:
    compare the used scales as well. After a difference the expected state continues from the
    observed one.
    """
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
                # libraries divide, or multiply by a reciprocal: either result is accepted
                turned = replace(how[0], reciprocal=not how[0].reciprocal)
                slot, other = committed(slot, how[0], largest), committed(slot, turned, largest)
            if "resize" in kinds and kind == "resize":
                slot = resized(slot, how[0])
            if "cut" in kinds and kind == "cut":
                slot = cut(slot, how[0])
            if "lose" in kinds and kind == "lose":
                slot = fresh(len(slot.window))
        if scales:  # an evaluation stages nothing, but uses the scale
            wrong += [scale for _, scale in waiting if scale != slot.scale]
            lines += [f"event {event}: quantised with another scale, {scale}" for scale in wrong]
        got = got or fresh(len(slot.window))
        if slot.equals(fresh(len(slot.window))):  # as a slot that was never used
            slot = fresh(len(got.window))
        slot = got if other is not None and got.equals(other) else slot
        lines.append(f"event {event}: expected {slot}\n         got      {got}")
        if wrong or not got.equals(slot):
            slot, shows = got, True
    return "\n".join(lines), shows
