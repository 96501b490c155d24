"""What one rule alone reads of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Datum(Generic[T]):
    """Data that has no other reader: ``judge/observe.py`` says how it is come by, and the rule that
    asks for it (``Evidence.datum``) what it is when it is wrong, so that the rule can be tried."""

    name: str
    #: The same with false numbers, made by a function of arrays; None: there is none to falsify.
    falsified: Callable[[T, Callable[[NDArray[Any]], NDArray[Any]]], T | None]
