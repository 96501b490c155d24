"""Cached strategies, because building one costs more than drawing from it, and examples of them."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")


@lru_cache(maxsize=None, typed=True)  # 0 and False are different choices
def sampled(*values: Any) -> st.SearchStrategy[Any]:
    """``sampled_from``, cached."""
    return st.sampled_from(values)


@cache
def between(low: int, high: int) -> st.SearchStrategy[int]:
    """``integers``, cached."""
    return st.integers(low, high)


def examples(strategy: st.SearchStrategy[T], count: int, number: int = 0) -> list[T]:
    """``count`` examples, the same for the same ``number``; the first is always the simplest."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(example: T) -> None:
        found.append(example)

    take()
    return found
