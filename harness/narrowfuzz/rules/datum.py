"""Data of a case that only one rule reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Datum(Generic[T]):
    """Data that only one rule reads (``Evidence.datum``), which ``judge/observe.py`` computes, and
    how to falsify it, so that ``narrowfuzz vacuity`` can test whether the rule notices."""

    name: str
    #: Returns the data with false numbers, made by the given function of arrays; None if there is
    #: nothing to falsify.
    falsified: Callable[[T, Callable[[NDArray[Any]], NDArray[Any]]], T | None]
