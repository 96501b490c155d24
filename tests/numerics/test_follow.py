"""One slot's state, followed by what each event owes to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from narrowfuzz.numerics.delayed import (
    FMAX,
    Policy,
    Slot,
    committed,
    cut,
    fresh,
    resized,
    staged,
)
from narrowfuzz.numerics.follow import compare_states

POLICY = Policy(3, "max", 0, "e4m3", "e5m2")
LARGEST = FMAX["e4m3"]
KINDS = ("stage", "commit", "resize", "cut", "lose")
ONE, TWO = np.float32(1.5), np.float32(2.5)
MOVES = {1: [("stage",)], 2: [("commit", POLICY)], 4: [("stage",), ("commit", POLICY)]}
SEEN = [[], [(ONE, np.float32(1))], [], [], [(TWO, np.float32(448 / 1.5))], []]


def states() -> list[Slot | None]:
    """What a right library holds after each event; the slot is there from event 1 on."""
    first = staged(fresh(3), ONE)
    second = committed(first, POLICY, LARGEST)
    third = committed(staged(second, TWO), POLICY, LARGEST)
    return [None, first, second, second, third, third]


def shows(held: list[Slot | None], scales: bool = True, **changes: object) -> bool:
    given = {"seen": SEEN, "moves": MOVES, **changes}
    told, shown = compare_states(  # type: ignore[call-arg]
        held, largest=LARGEST, history=3, kinds=KINDS, scales=scales, **given
    )
    assert told.count("expected") == len(held)
    return shown


def test_a_right_library_follows() -> None:
    assert not shows(states())


@pytest.mark.parametrize("event", range(1, 6))
def test_every_other_state_shows(event: int) -> None:
    held = states()
    held[event] = replace(held[event] or fresh(3), scale=np.float32(7))
    assert shows(held)


def test_a_slot_that_is_lost_shows_unless_a_reload_forgets_it() -> None:
    held = [*states()[:5], None]
    assert shows(held)
    assert not shows(held, moves={**MOVES, 5: [("lose",)]})


def test_a_cast_with_another_scale_shows_where_scales_are_known() -> None:
    seen = [*SEEN[:4], [(TWO, np.float32(3))], []]
    assert shows(states(), seen=seen)
    assert not shows(states(), scales=False, seen=seen)


def test_each_cast_is_held_to_the_scale_that_stood_then() -> None:
    """An event may update between two casts."""
    first = committed(staged(fresh(3), ONE), POLICY, LARGEST)
    second = committed(staged(first, TWO), POLICY, LARGEST)
    moves = {0: [("stage",), ("commit", POLICY), ("stage",), ("commit", POLICY)]}
    right = [[(ONE, np.float32(1)), (TWO, first.scale)]]
    for seen, shown in ((right, False), ([[*right[0][:1], (TWO, np.float32(1))]], True)):
        _, shows = compare_states(
            [second], seen, moves, LARGEST, history=3, kinds=KINDS, scales=True
        )
        assert shows is shown


def test_an_update_may_divide_or_multiply_by_a_reciprocal() -> None:
    amax = np.float32(3 / 7)
    ways = [
        committed(staged(fresh(3), amax), replace(POLICY, reciprocal=turned), LARGEST)
        for turned in (False, True)
    ]
    assert not ways[0].equals(ways[1])
    moves = {0: [("stage",), ("commit", POLICY)]}
    for held in ways:
        seen = [[(amax, None)]]
        assert not compare_states(
            [held], seen, moves, LARGEST, history=3, kinds=KINDS, scales=False
        )[1]


def test_windows_are_resized_at_their_oldest_end_or_cut_as_built() -> None:
    last = states()[-1]
    assert last is not None
    moved = {**MOVES, 5: [("resize", 2)]}
    assert not shows([*states()[:5], resized(last, 2)], moves=moved)
    assert shows([*states()[:5], cut(last, 2)], moves=moved)
    assert not shows([*states()[:5], cut(last, 2)], moves={**MOVES, 5: [("cut", 2)]})


def test_after_a_difference_it_goes_on_from_what_was_held() -> None:
    wrong = replace(states()[1] or fresh(3), scale=np.float32(2))
    held = [None, wrong, wrong, wrong]
    told, shown = compare_states(held, SEEN[:4], {1: [("stage",)]}, LARGEST,
                           history=3, kinds=KINDS, scales=False)  # fmt: skip
    assert shown and told.count("expected scale 2") == 2
