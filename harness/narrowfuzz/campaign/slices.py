"""What a worker's time is cut into, and how recipes and models are dealt to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from narrowfuzz.case import Compile

T = TypeVar("T")

Models = Literal["linears", "models", "either", "recomputed"]


class Slice(NamedTuple):
    """A stretch of a worker's time, and what it draws in it."""

    kind: Compile | Literal["schedule"]
    seconds: float
    #: What it draws: single linears, models, either, or blocks that are recomputed in part.
    models: Models = "either"


_LINEARS, _MODELS = Slice("none", 5.0, "linears"), Slice("none", 2.5, "models")
#: What a campaign begins with: what eager shows, it shows in seconds, while the first compiled
#: model may take a minute. Forty models take as long as ten linears, and a slice sees few of the
#: models there are.
FIRST: tuple[Slice, ...] = (_LINEARS, _MODELS, _MODELS) * 5
#: Then these, again and again. One slice has time for forty eager models, while a compiled one may
#: take ten: half of the slices are eager, and most of the time is the compiler's. Linears, models,
#: and blocks that partial recompute may break take turns.
_INDUCTOR = Slice("inductor", 4.0, "models")
_RECOMPUTED = Slice("inductor", 4.0, "recomputed")
#: Ten times cheaper than what Inductor compiles.
_PARTITIONED = Slice("aot_eager_decomp_partition", 4.0, "models")
AGAIN: tuple[Slice, ...] = (
    Slice("aot_eager", 4.0), _MODELS, _MODELS, _INDUCTOR, Slice("inductor", 4.0, "linears"),
    _LINEARS, _RECOMPUTED, _PARTITIONED, _MODELS, _MODELS, _INDUCTOR, _LINEARS, _RECOMPUTED,
    _MODELS, _MODELS, Slice("inductor", 4.0, "linears"), _PARTITIONED, _INDUCTOR,
)  # fmt: skip


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
