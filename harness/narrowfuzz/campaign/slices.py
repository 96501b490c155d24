"""What a worker's time is cut into, and how recipes and models are dealt to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from narrowfuzz.case.arm import COMPILERS, Compile

T = TypeVar("T")

#: Single linears; models; such of them as compile in a few seconds; either; blocks that are
#: recomputed in part; other operators than linears, alone; what ranks share; or what is in the
#: corpus, and near it.
Models = Literal[
    "linears", "models", "small", "either", "recomputed", "operators", "ranks", "corpus"
]


class Slice(NamedTuple):
    """A stretch of a worker's time, and what it draws in it."""

    kind: Compile | Literal["schedule", "sharded"]
    seconds: float
    models: Models = "either"
    #: A compiled model is judged on data until that has taken this share of compiling it.
    data: float = 0.75
    #: It serves so many draws, however fast it was to compile.
    least: int = 20


_LINEARS, _MODELS = Slice("none", 5.0, "linears"), Slice("none", 2.5, "models")
_OPERATORS = Slice("none", 2.5, "operators")
#: Sixty of them in three dtypes have their turn in a few of these.
_MORE_OPERATORS = Slice("none", 5.0, "operators")
#: On ranks: a case takes as long as ten of one process.
_SHARDED = Slice("sharded", 3.0, "ranks")
#: What has shown something before, and what is near it.
_CORPUS, _SHARDED_CORPUS = Slice("none", 2.5, "corpus"), Slice("sharded", 2.0, "corpus")
_COMPILED_CORPUS = Slice("inductor", 4.0, "corpus")
_COMPILED_LINEARS = Slice("inductor", 4.0, "linears")
_SMALL = Slice("inductor", 4.0, "small")
_BLOCKS = Slice("inductor", 4.0, "models")
_COMPILED_OPERATORS = Slice("inductor", 4.0, "operators")
_RECOMPUTED = Slice("inductor", 4.0, "recomputed")
#: Ten times cheaper than what Inductor compiles.
_PARTITIONED = Slice("aot_eager_decomp_partition", 4.0, "models")
#: What a campaign begins with: what eager shows, it shows in seconds. What only a compiled graph
#: shows, most of a library's linears or small models show, on little data, and much of it without
#: code being generated. Forty eager models take as long as ten linears, and a slice sees few of the
#: models there are.
_FIRST_PARTITIONED = Slice("aot_eager_decomp_partition", 6.0, "small", data=0.25, least=6)
_FIRST_LINEARS, _FIRST_SMALL = (one._replace(data=0.25) for one in (_COMPILED_LINEARS, _SMALL))
FIRST: tuple[Slice, ...] = (
    _CORPUS,
    _LINEARS,
    _MODELS,
    _OPERATORS,
    _MODELS,
    _FIRST_PARTITIONED,
    _OPERATORS,
    _FIRST_LINEARS,
    _MODELS,
    _FIRST_SMALL,
    _SHARDED,
    _COMPILED_CORPUS,
    _LINEARS,
    _FIRST_PARTITIONED,
    _FIRST_LINEARS,
    _MODELS,
    _FIRST_SMALL,
    _LINEARS,
    _FIRST_PARTITIONED,
    _MODELS,
    _FIRST_SMALL,
    _MODELS,
)
#: Then these, again and again. One slice has time for forty eager models, while a compiled one may
#: take ten: half of the slices are eager, and most of the time is the compiler's. Linears, small
#: models, any models, and blocks that partial recompute may break take turns.
_IN_TURN: tuple[Slice, ...] = (
    _SMALL,
    _RECOMPUTED,
    _MORE_OPERATORS,
    _MODELS,
    _MODELS,
    _CORPUS,
    _SMALL,
    _COMPILED_LINEARS,
    _LINEARS,
    _COMPILED_OPERATORS,
    _SHARDED,
    _COMPILED_CORPUS,
    _BLOCKS,
    _MODELS,
    _PARTITIONED,
    _MORE_OPERATORS,
    _MODELS,
    _SMALL,
    _LINEARS,
    _SHARDED_CORPUS,
    _RECOMPUTED,
    _MODELS,
    _MODELS,
    _COMPILED_LINEARS,
)
_NAMED = {one.kind for one in (*FIRST, *_IN_TURN)}
#: Any other compiler has one slice.
AGAIN = (*_IN_TURN, *(Slice(word, 4.0) for word in COMPILERS if word not in _NAMED))


@dataclass
class Deck(Generic[T]):
    """Cards in a drawn order, shuffled anew when all have been dealt."""

    cards: Sequence[T]
    rng: random.Random
    remaining: list[T] = field(default_factory=list)

    def hand(self, size: int) -> list[T]:
        """The next ``size`` cards, no card twice; all of them where there are no more."""
        size = min(size, len(self.cards))
        hand, self.remaining = self.remaining[:size], self.remaining[size:]
        if len(hand) < size:
            # what was just dealt comes last in the new order
            again = self.rng.sample(self.cards, len(self.cards))
            fresh = [card for card in again if card not in hand]
            missing = size - len(hand)
            self.remaining = fresh[missing:] + hand
            hand = hand + fresh[:missing]
        return hand

    def unused(self, cards: Sequence[T]) -> None:
        """These were dealt, and nobody played them: they come first again."""
        self.remaining = [*cards, *(card for card in self.remaining if card not in cards)]
