"""What one rule alone reads of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Datum(Generic[T]):
    """Data that one rule reads (``Evidence.datum``). ``judge/observe.py`` says how it is made; this
    says how to falsify it, so that ``narrowfuzz vacuity`` can ask whether the rule notices."""

    name: str
    #: The same with false numbers, made by a function of arrays; None: there is none to falsify.
    falsified: Callable[[T, Callable[[NDArray[Any]], NDArray[Any]]], T | None]
