"""Finds where the answer changes along a line of versions. Nothing here runs a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Answer = Literal["shows", "gone", "cannot tell"]
#: Number of versions below the oldest one that can tell that are tried all the same.
_BELOW = 3


@dataclass(frozen=True)
class VersionAnswer:
    """The answer of one version; ``why``: the reason if it cannot tell."""

    version: str
    answer: Answer
    why: str = ""


@dataclass
class Line:
    """Versions from the oldest to the newest. Each is tried at most once; ``answers`` maps the
    places of the tried ones to their answers."""

    versions: Sequence[str]
    ask: Callable[[str], VersionAnswer]
    answers: dict[int, VersionAnswer] = field(default_factory=dict)

    def at(self, place: int) -> VersionAnswer:
        """The answer of the version at this place."""
        if place not in self.answers:
            self.answers[place] = self.ask(self.versions[place])
        return self.answers[place]


@dataclass(frozen=True)
class Change:
    """Two versions with different answers, the older first, between which no other can tell."""

    before: VersionAnswer
    after: VersionAnswer
    between: tuple[VersionAnswer, ...] = ()

    @property
    def appears(self) -> bool:
        """True if the newer one shows the divergence."""
        return self.after.answer == "shows"


def change(line: Line, low: int, high: int) -> Change:
    """Where the answer changes between two places whose answers are known and differ. If there are
    several changes, one of them is found."""
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
    """The place of an older version that does not show what the one at ``high`` shows, found by
    bisection; None if every tried one that can tell shows it.

    Old releases lack functions that a script calls. So a version on which the script cannot run is
    taken as older than all usable ones; ``_BELOW`` versions below it are tried anyway.
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
