"""Strategies built once: building one costs more than drawing from it."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from hypothesis import strategies as st


@lru_cache(maxsize=None, typed=True)  # 0 and False are different choices
def sampled(*values: Any) -> st.SearchStrategy[Any]:
    """sampled_from, built once."""
    return st.sampled_from(values)


@cache
def between(low: int, high: int) -> st.SearchStrategy[int]:
    """integers, built once."""
    return st.integers(low, high)
