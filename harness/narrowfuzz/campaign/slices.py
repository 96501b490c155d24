"""The slices of a worker's time, and the decks of recipes and models, which are round-robin queues
that are reshuffled when used up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from narrowfuzz.case.arm import COMPILERS, Compile

T = TypeVar("T")

#: What a slice draws: single linears; models; models that compile in a few seconds; linears or
#: models; blocks that are partially recomputed; single operators other than linears; models on
#: ranks; or cases of the corpus and their neighbours.
Models = Literal[
    "linears", "models", "small", "either", "recomputed", "operators", "ranks", "corpus"
]


class Slice(NamedTuple):
    """A stretch of a worker's time, and what it draws in it."""

    kind: Compile | Literal["schedule", "sharded"]
    seconds: float
    models: Models = "either"
    #: A compiled model is judged on data draws until they have taken this share of its compile
    #: time.
    data: float = 0.75
    #: It serves at least this number of draws, however fast it was compiled.
    least: int = 20

    @property
    def compiled(self) -> bool:
        """True if the slice's models are compiled."""
        return self.kind not in ("none", "schedule", "sharded")


_LINEARS, _MODELS = Slice("none", 5.0, "linears"), Slice("none", 2.5, "models")
_OPERATORS = Slice("none", 2.5, "operators")
#: A few of these slices cover sixty operators in three dtypes.
_MORE_OPERATORS = Slice("none", 5.0, "operators")
#: On ranks a case takes as long as ten cases in one process.
_SHARDED = Slice("sharded", 3.0, "ranks")
#: Cases that have shown a divergence before, and their neighbours.
_CORPUS, _SHARDED_CORPUS = Slice("none", 2.5, "corpus"), Slice("sharded", 2.0, "corpus")
_COMPILED_CORPUS = Slice("inductor", 4.0, "corpus")
_COMPILED_LINEARS = Slice("inductor", 4.0, "linears")
_SMALL = Slice("inductor", 4.0, "small")
_BLOCKS = Slice("inductor", 4.0, "models")
_COMPILED_OPERATORS = Slice("inductor", 4.0, "operators")
_RECOMPUTED = Slice("inductor", 4.0, "recomputed")
#: Ten times cheaper than compiling with Inductor.
_PARTITIONED = Slice("aot_eager_decomp_partition", 4.0, "models")
#: A campaign begins with these. Bugs that show in eager mode show within seconds. Bugs that show
#: only in compiled graphs show in most of a library's linears or small models, on few data draws,
#: and many of them without code generation. Forty eager models take as long as ten linears, and a
#: slice sees only few of all models.
_FIRST_PARTITIONED = Slice("aot_eager_decomp_partition", 6.0, "small", data=0.25, least=6)
_FIRST_LINEARS, _FIRST_SMALL, _FIRST_OPERATORS, _FIRST_RECOMPUTED = (
    one._replace(data=0.25) for one in (_COMPILED_LINEARS, _SMALL, _COMPILED_OPERATORS, _RECOMPUTED)
)
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
    _OPERATORS,
    _FIRST_OPERATORS,
    _FIRST_SMALL,
    _SHARDED,
    _COMPILED_CORPUS,
    _LINEARS,
    _OPERATORS,
    _FIRST_PARTITIONED,
    _FIRST_LINEARS,
    _MODELS,
    _FIRST_OPERATORS,
    _FIRST_SMALL,
    _LINEARS,
    _FIRST_PARTITIONED,
    _MODELS,
    _FIRST_RECOMPUTED,
    _MODELS,
)
#: Then these, again and again. One slice has time for forty eager models, while one compiled model
#: may take ten slices' time: half of the slices are eager, and most of the time goes to the
#: compiler. Linears, small models, any models, and blocks that partial recompute may break take
#: turns.
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
#: The slices above, and one for each other compiler.
AGAIN = (*_IN_TURN, *(Slice(word, 4.0) for word in COMPILERS if word not in _NAMED))

#: Compiled slices that came while compiling had taken too much time, and are served later: at most
#: this number of them, so that they do not come all at once then.
_OWED = 4


def in_turn(
    first: Sequence[Slice], again: Sequence[Slice], overspent: Callable[[], bool]
) -> Iterator[Slice]:
    """The slices of ``first``, then those of ``again`` over and over. Compiled ones wait while
    compiling has ``overspent`` its time, and others take their place: one compiled model may
    outlast its slice ten times."""
    order = itertools.chain(first, itertools.cycle(again))
    if all(one.compiled for one in again):
        yield from order
        return
    compiled = itertools.chain(
        [one for one in first if one.compiled],
        itertools.cycle([one for one in again if one.compiled]),
    )
    owed = 0
    for now in order:
        if now.compiled:
            owed = min(owed + 1, _OWED)
        else:
            yield now
        while owed and not overspent():
            owed -= 1
            yield next(compiled)


@dataclass
class Deck(Generic[T]):
    """A round-robin queue: cards in a drawn order, shuffled anew when all have been taken."""

    cards: Sequence[T]
    rng: random.Random
    remaining: list[T] = field(default_factory=list)

    def take(self, size: int) -> list[T]:
        """The next ``size`` cards, no card twice; all cards if the deck has no more than that."""
        size = min(size, len(self.cards))
        taken, self.remaining = self.remaining[:size], self.remaining[size:]
        if len(taken) < size:
            # what was just taken comes last in the new order
            again = self.rng.sample(self.cards, len(self.cards))
            fresh = [card for card in again if card not in taken]
            missing = size - len(taken)
            self.remaining = fresh[missing:] + taken
            taken = taken + fresh[:missing]
        return taken

    def unused(self, cards: Sequence[T]) -> None:
        """Put back cards that were taken but not used: they are taken first again."""
        self.remaining = [*cards, *(card for card in self.remaining if card not in cards)]
