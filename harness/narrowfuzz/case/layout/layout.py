"""A way in which ranks share a training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowfuzz.case.spec import LARGEST, ModelName, Sharding, Spec

#: What a layout that is asked for makes impossible, a sentence each; of a Spec, given what its
#: recipe is laid out by.
Objections = Callable[[Spec, Collection[str]], Iterator[str]]
#: Shardings that are simpler in one thing: how that is called, and which fields it changes.
Simpler = Callable[[Sharding], Iterator[tuple[str, Mapping[str, Any]]]]


@dataclass(frozen=True)
class Layout:
    """Everything about a layout that needs no torch. What plays it is a module of ``play``."""

    name: str
    #: Is it what a sharding asks for?
    asked: Callable[[Sharding], bool]
    #: May ranks share this model so?
    takes: Callable[[ModelName], bool]
    #: The Spec with the sizes that its ranks share evenly.
    fit: Callable[[Spec], Spec]
    objections: Objections
    simpler: Simpler
    #: All ranks are one group, which runs the case once.
    together: bool = False
    #: Ranks may be threads of one process.
    threads: bool = True
    #: The only arm that it runs on besides eager; "": those of all layouts.
    arm: str = ""
    #: How often the model stands in a row; 0: it stands alone.
    copies: Callable[[Sharding], int] = lambda sharding: 0
    #: Are sums cut over its ranks, and so come in another order?
    cuts_sums: Callable[[Sharding], bool] = lambda sharding: False
    #: Its results are compared with a float64 run of one process.
    approximate: bool = False


def up(size: int, multiple: int) -> int:
    """The next multiple of a size, at least one and no larger than sizes may be."""
    return min(-(-max(size, 1) // multiple), LARGEST // multiple) * multiple
