"""What strategies draw, the same each time."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

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


def drawn_in_lots(strategy: SearchStrategy[T], count: int, lot: int = 100) -> list[T]:
    """The same of so many seeds: Hypothesis repeats variants of what it drew before, and many draws
    of one run would show holes."""
    lots = range(max(1, count // lot))
    return [one for start in lots for one in drawn(strategy, min(count, lot), start)]
