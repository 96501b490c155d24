"""A deck gives all of its cards before it gives one again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from narrowfuzz.campaign.slices import Deck


@pytest.mark.parametrize(("cards", "size"), [(14, 4), (5, 4), (4, 4), (3, 1)])
def test_all_cards_come_before_one_comes_again(cards: int, size: int) -> None:
    deck = Deck(list(range(cards)), random.Random(1))
    hands = [deck.take(size) for _ in range(60)]
    assert all(len(set(hand)) == size for hand in hands)
    seen = [card for hand in hands for card in hand]
    for card in range(cards):
        at = [i for i, other in enumerate(seen) if other == card]
        assert all(later - earlier < 2 * cards for earlier, later in pairwise(at))
    assert len({tuple(hand) for hand in hands}) > 1


def test_a_hand_is_no_larger_than_the_deck() -> None:
    assert sorted(Deck("ab", random.Random(1)).take(4)) == ["a", "b"]
    assert Deck((), random.Random(1)).take(4) == []


def test_what_nobody_played_comes_first_again() -> None:
    deck = Deck("abcdef", random.Random(1))
    hand = deck.take(4)
    deck.unused(hand[1:])
    assert deck.take(3) == hand[1:]
    rest = deck.take(2)
    assert sorted([*hand, *rest]) == list("abcdef")


def test_what_comes_first_again_comes_once() -> None:
    deck = Deck("abc", random.Random(1))
    deck.take(2)
    late = deck.take(2)  # the second is of a new order
    deck.unused(late)
    assert sorted(deck.take(3)) == list("abc")
