"""Dealing recipes and models to slices: all of them come before one comes again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Deck(Generic[T]):
    """Cards in a drawn order, shuffled anew when all have been dealt."""

    cards: Sequence[T]
    rng: random.Random
    left: list[T] = field(default_factory=list)

    def hand(self, size: int) -> list[T]:
        """The next ``size`` cards, no card twice; all of them where there are no more."""
        size = min(size, len(self.cards))
        hand, self.left = self.left[:size], self.left[size:]
        if len(hand) < size:
            # what was just dealt comes last in the new order
            again = self.rng.sample(self.cards, len(self.cards))
            fresh = [card for card in again if card not in hand]
            missing = size - len(hand)
            self.left = fresh[missing:] + hand
            hand = hand + fresh[:missing]
        return hand
