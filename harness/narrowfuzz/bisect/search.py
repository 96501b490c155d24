"""Where along a line of versions an answer changes. Nothing here runs anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Answer = Literal["shows", "gone", "cannot tell"]
#: So many versions below the oldest that can tell are asked whether they can, after all.
_BELOW = 3


@dataclass(frozen=True)
class Asked:
    """What one version says; ``why`` it cannot tell."""

    version: str
    answer: Answer
    why: str = ""


@dataclass
class Line:
    """Versions from the oldest to the newest. Each is asked once, and what was asked is kept in
    that order."""

    versions: Sequence[str]
    ask: Callable[[str], Asked]
    answers: dict[int, Asked] = field(default_factory=dict)

    def at(self, place: int) -> Asked:
        """The answer of the version at this place."""
        if place not in self.answers:
            self.answers[place] = self.ask(self.versions[place])
        return self.answers[place]


@dataclass(frozen=True)
class Change:
    """Two versions with different answers, the older first, between which no other can tell."""

    before: Asked
    after: Asked
    between: tuple[Asked, ...] = ()

    @property
    def appears(self) -> bool:
        """Is it the newer one that shows it?"""
        return self.after.answer == "shows"


def change(line: Line, low: int, high: int) -> Change:
    """Where the answer changes between two places whose answers are known and differ. Of several
    changes it is one of them."""
    first, last = line.at(low), line.at(high)
    assert {first.answer, last.answer} == {"shows", "gone"}, (first, last)
    while middle := next(_from_middle(line, low, high), None):
        if line.at(middle).answer == first.answer:
            low = middle
        else:
            high = middle
    between = tuple(line.at(place) for place in range(low + 1, high))
    return Change(line.at(low), line.at(high), between)


def _from_middle(line: Line, low: int, high: int) -> Iterator[int]:
    """Places between two others that can tell, from the middle outwards."""
    middle = (low + high) / 2
    for place in sorted(range(low + 1, high), key=lambda place: (abs(place - middle), place)):
        if line.at(place).answer != "cannot tell":
            yield place


def oldest(line: Line, high: int) -> int | None:
    """The place of a version that no longer shows what the one at ``high`` shows, by halves
    downwards; None where every older one that can tell shows it.

    Old releases lack what a script calls: what cannot tell is taken for the end of those that can,
    and a few below it are asked all the same.
    """
    floor = -1
    while floor + 1 < high:
        middle = (floor + high) // 2
        middle = max(middle, floor + 1)
        match line.at(middle).answer:
            case "gone":
                return middle
            case "shows":
                high = middle
            case _:
                floor = middle
    below = range(floor - 1, max(-1, floor - 1 - _BELOW), -1)
    return next((place for place in below if line.at(place).answer == "gone"), None)
