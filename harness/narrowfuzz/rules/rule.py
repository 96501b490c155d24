"""The record of a rule, and helpers every rule file uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from narrowfuzz.rules.evidence import same_bits
from narrowfuzz.trace.expect import number
from narrowfuzz.trace.trace import Level
from narrowfuzz.trace.verdict import Status, Strength, Verdict

Kind = Literal["converted", "sharded", "pipeline", "context", "library"]
Check = Callable[[Any], Iterator[Verdict]]


#: What a rule looks at, so that it can be falsified: how a run ended, what conversion did, results,
#: whether they are finite or NaN, the bias gradient; what multiplies saw; `again` is the same in a
#: run that it asks for; of a schedule casts, formats of products, state, what is set aside, and the
#: run among the remains of others, and results and state on ranks; what backwards of a user's
#: own Functions give.
Reads = Literal[
    "run", "conversion", "results", "finite", "nan", "bias gradient", "operands", "scales", "amax",
    "second copies", "recomputed", "statistics", "results again", "operands again", "scales again",
    "casts", "formats", "states", "kept state", "pending", "company",
    "results on ranks", "states on ranks", "derivatives",
]  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A rule over traces: its strength, the exposure it needs, and when it may be applied."""

    name: str
    title: str
    strength: Strength
    level: Level
    precondition: str
    check: Check
    #: Rules whose divergence on the same role explains one of this rule.
    upstream: frozenset[str] = frozenset()
    #: True: runs the arm again on transformed data.
    reruns: bool = False
    #: ``layer``: judged at each linear, from what it got and returned. ``case``: at the whole run.
    scope: Literal["layer", "case"] = "layer"
    reads: tuple[Reads, ...] = ("results",)
    #: Whose cases it judges: those of a converted model in one process, or on ranks, or those of a
    #: library's own layers.
    of: Kind = "converted"


@lru_cache(4096)  # most verdicts are the same few
def plain(rule: str, arm: str, role: str, status: Status, why: str = "") -> Verdict:
    """A verdict that points at nothing."""
    return Verdict(rule, arm, role, status, why=why)


def first(bad: Any) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(int(i) for i in np.argwhere(bad)[0])


__all__ = ["Check", "Rule", "first", "number", "plain", "same_bits"]
