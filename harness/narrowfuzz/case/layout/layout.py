"""A way in which ranks share a training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from narrowfuzz.case.spec import LARGEST, ModelName, Sharding, Shards, Spec

#: What a layout that is asked for makes impossible, a sentence each; of a Spec, given what its
#: recipe is laid out by.
Objections = Callable[[Spec, Collection[str]], Iterator[str]]
#: Shardings that are simpler in one thing: how that is called, and which fields it changes.
Simpler = Callable[[Sharding], Iterator[tuple[str, Mapping[str, Any]]]]
#: A record of what each rank must know; of a Spec, and of its linears that share no parameter.
Placement = Callable[[Spec, Sequence[str]], Any]
#: Fields of a Sharding and of a Spec, and the values that these together may be drawn with.
Choice = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]

#: Steps, and microbatches of each, as often as they are drawn.
SCHEDULES = ((1, 1), (1, 1), (2, 1), (2, 1), (1, 2))


@dataclass(frozen=True)
class Layout:
    """Everything about a layout that needs no torch. What plays it is a module of ``play``."""

    #: What that module is called, and its function play_<name>.
    name: str
    #: Does this sharding ask for it? The first of ``LAYOUTS`` is taken.
    asked: Callable[[Sharding], bool]
    #: May ranks share this model so?
    takes: Callable[[ModelName], bool]
    #: The Spec with sizes that its ranks share evenly, and what else they can train.
    fit: Callable[[Spec], Spec]
    objections: Objections
    simpler: Simpler
    placement: Placement
    #: What is drawn of it, in this order; (): a strategy of its own draws it.
    drawn: tuple[Choice, ...] = ()
    #: What a recipe's ``shards`` must have; None: anything.
    by: Shards | None = None
    #: All ranks are one group, which runs the case once.
    together: bool = False
    #: Ranks may be threads of one process.
    threads: bool = True
    #: Or processes, where its sharding asks for them besides.
    processes: bool = False
    #: The name and the title of an arm of its own, besides eager, of a layout that PyTorch runs on
    #: GPUs alone (its player says with ``unavailable()`` why no CPU does); "": it runs on the arms
    #: of all.
    arm: str = ""
    title: str = ""
    #: Its ranks may be compiled.
    compiles: bool = True
    #: How often the model stands in a row, as its player's ``chained`` makes it;
    #: None: it stands alone.
    copies: Callable[[Sharding], int] | None = None
    #: Are sums cut over its ranks, and so come in another order?
    cuts_sums: Callable[[Sharding], bool] = lambda sharding: False
    #: What scales its losses: torch's GradScaler, which learns of other ranks' infinities from
    #: distributed tensors alone, or ShardedGradScaler, which asks them; "": nothing can.
    scales: Literal["", "grad_scaler", "sharded"] = ""
    #: How its gradients may be clipped: no function of torch takes the norm of all stages of a
    #: pipeline, and an element of which each rank has a summand cannot be clipped by itself.
    clips: tuple[str, ...] = ()
    #: Its parameters are recorded after each step.
    follows_steps: bool = False
    #: Its results are compared with a float64 run of one process.
    approximate: bool = False

    @property
    def chained(self) -> bool:
        """Does each rank have some of several models in a row?"""
        return self.copies is not None

    @property
    def player(self) -> ModuleType:
        """The module of ``play``, which needs torch."""
        return import_module(f"narrowfuzz.play.{self.name}")

    @property
    def play(self) -> Callable[..., Any]:
        """What trains a model so: the player's traces, one of each rank."""
        return getattr(self.player, f"play_{self.name}")  # type: ignore[no-any-return]


def up(size: int, multiple: int) -> int:
    """The next multiple of a size, at least one and no larger than sizes may be."""
    return min(-(-max(size, 1) // multiple), LARGEST // multiple) * multiple
