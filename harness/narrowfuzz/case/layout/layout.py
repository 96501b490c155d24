"""The record of a layout: a way in which ranks share a training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from narrowfuzz.case.sharding import Sharding, Shards
from narrowfuzz.case.spec import LARGEST, ModelName, Spec

#: (Spec, ways in which its recipe can be laid out) -> reasons why the layout cannot run the Spec,
#: one sentence each.
Objections = Callable[[Spec, Collection[str]], Iterator[str]]
#: Sharding -> shardings that are simpler in one respect: its description, and the fields to change.
Simpler = Callable[[Sharding], Iterator[tuple[str, Mapping[str, Any]]]]
#: (Spec, names of its linears that share no parameter) -> a record of what each rank must know.
Placement = Callable[[Spec, Sequence[str]], Any]
#: Names of fields of a Sharding or a Spec, and the combinations of values to draw for them.
Choice = tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]

#: (steps, microbatches), repeated by the weight with which they are drawn.
SCHEDULES = ((1, 1), (1, 1), (2, 1), (2, 1), (1, 2))


@dataclass(frozen=True)
class Layout:
    """Everything about a layout that needs no torch. Its player, a module of ``play``, runs it."""

    #: Name of the player's module, whose function is play_<name>.
    name: str
    #: True if the sharding selects this layout, unless an earlier one in ``LAYOUTS`` does.
    matches: Callable[[Sharding], bool]
    #: True if ranks can share this model in this layout.
    takes: Callable[[ModelName], bool]
    #: The Spec, changed so that its ranks can train it: sizes divide evenly, for example.
    fit: Callable[[Spec], Spec]
    objections: Objections
    simpler: Simpler
    placement: Placement
    #: The fields that are drawn, in this order; (): the layout has a strategy of its own.
    drawn: tuple[Choice, ...] = ()
    #: A value that a recipe's ``shards`` must contain; None: any.
    requires_shard: Shards | None = None
    #: All ranks form one group, which runs the case once.
    single_group: bool = False
    #: Ranks may be threads of one process.
    threads: bool = True
    #: Ranks may also be processes, if ``Sharding.processes`` is set.
    processes: bool = False
    #: Name and title of the layout's own arm, run besides eager, for a layout that PyTorch supports
    #: only on GPUs (the player's ``unavailable()`` returns why a CPU does not run it); "": it runs
    #: on the common arms.
    arm: str = ""
    title: str = ""
    #: Its ranks may be compiled.
    compiles: bool = True
    #: Number of copies of the model in a row, which the player's ``chained`` builds; None: the
    #: model is not repeated.
    copies: Callable[[Sharding], int] | None = None
    #: True if sums are split over the ranks, and so added in another order.
    cuts_sums: Callable[[Sharding], bool] = lambda sharding: False
    #: Who scales its losses: torch's GradScaler, which detects other ranks' infinities only in
    #: distributed tensors, or ShardedGradScaler, which communicates them; "": neither works.
    scales: Literal["", "grad_scaler", "sharded"] = ""
    #: The supported kinds of clipping. No function of torch computes the norm over all stages of a
    #: pipeline, and an element of which each rank has a summand cannot be clipped by value.
    clips: tuple[str, ...] = ()
    #: Its parameters are recorded after each step.
    follows_steps: bool = False
    #: Its results are compared, within a tolerance, with a float64 run of one process.
    approximate: bool = False

    @property
    def chained(self) -> bool:
        """True if the model is repeated in a row, with some of the copies on each rank."""
        return self.copies is not None

    @property
    def player(self) -> ModuleType:
        """The module of ``play``, which needs torch."""
        return import_module(f"narrowfuzz.play.{self.name}")

    @property
    def play(self) -> Callable[..., Any]:
        """The player's function, which trains a model and returns a trace for each rank."""
        return getattr(self.player, f"play_{self.name}")  # type: ignore[no-any-return]


def up(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple of ``multiple``: at least that, and at most LARGEST."""
    return min(-(-max(size, 1) // multiple), LARGEST // multiple) * multiple
