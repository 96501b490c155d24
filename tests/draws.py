"""What strategies draw, the same each time."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import StopTest
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies import SearchStrategy
from narrowfuzz.campaign.generator import _wherever_files_lie

T = TypeVar("T")
#: Of a property that is tried on the same examples each time, which are not made smaller.
ONCE = settings(
    database=None, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def drawn(strategy: SearchStrategy[T], count: int, start: int = 0) -> list[T]:
    """What it draws, ``count`` times, from this seed on."""
    found: list[T] = []

    @seed(start)
    @settings(ONCE, max_examples=count)
    @given(strategy)
    def collect(value: T) -> None:
        found.append(value)

    collect()
    return found


def drawn_apart(strategy: SearchStrategy[T], count: int, start: int = 0) -> list[T]:
    """What it draws ``count`` times from this seed on, each time for itself: Hypothesis repeats
    variants of what it drew before, and many of these would show holes."""
    chance, found = Random(start), list[T]()
    with _wherever_files_lie():
        while len(found) < count:
            with suppress(StopTest):  # it is rejected by a filter
                found.append(ConjectureData(random=chance).draw(strategy))
    return found
