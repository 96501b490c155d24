"""The record of a rule, which cases it may judge, and helpers every rule file uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import msgspec
import numpy as np

from narrowfuzz.case.kind import CONVERTED, Kind
from narrowfuzz.rules.datum import Datum
from narrowfuzz.rules.evidence import same_bits
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Expect, Is, Same, bits, number
from narrowfuzz.trace.trace import Level
from narrowfuzz.trace.verdict import Status, Strength, Verdict

Check = Callable[[Any], Iterator[Verdict]]


#: What a rule reads of a case, each kind with what falsifies it (``power/reads.py``, and for layers
#: of a library ``power/schedules.py``).
Reads = Literal[
    "run",  # how a run ended
    "conversion",  # what converting changed in the model
    "results",  # outputs and gradients
    "finite",  # whether they are finite
    "nan",  # whether they are NaN
    "bias gradient",
    "operands",  # of GEMMs, as they were observed
    "scales",  # of these operands
    "amax",  # and their maxima
    "second copies",  # of a tensor that is quantised for a second GEMM
    "recomputed",  # what a checkpoint's recompute multiplied
    "statistics",  # what attention keeps for its backward
    "results again",  # the same of a rerun that the rule asks for
    "operands again",
    "scales again",
    "casts",  # of a schedule, as are all that follow but the last
    "formats",  # of products
    "states",  # scales and windows of maxima
    "kept state",  # of what is not stepped
    "pending",  # what is set aside for a later step
    "after other models",  # a run in a process in which others ran before
    "results on ranks",
    "states on ranks",
    "operators",  # what calls of operators returned
]


@dataclass(frozen=True)
class Rule:
    """A rule over traces: its strength, what it reads, and whose cases it judges. What it says
    stands in ``rules.toml``."""

    strength: Strength
    name: str
    check: Check
    #: Rules whose divergence explains one of this rule: of one that judges layers on the same role,
    #: of one that judges the whole run on the same arm (``causes.py`` has the exceptions).
    upstream: frozenset[str] = frozenset()
    reads: tuple[Reads, ...] = ("results",)
    #: What this rule alone reads, each with a falsification of its own (``datum.py``).
    data: tuple[Datum[Any], ...] = ()
    level: Level = "C"
    #: ``layer``: judged at each linear, from what it got and returned. ``case``: at the whole run.
    scope: Literal["layer", "case"] = "layer"
    #: True: runs the arm again on transformed data.
    reruns: bool = False
    #: True: also judges what happened in a run that did not come to its end.
    unfinished: bool = False
    #: Whose cases it judges.
    cases: tuple[Kind, ...] = CONVERTED


exact, bound = partial(Rule, "exact"), partial(Rule, "bound")
ratio = partial(Rule, "ratio", scope="case")
#: Exact, of the whole run, or of what multiplies saw.
whole, seen = partial(exact, scope="case"), partial(exact, level="A")
#: Exact, between a run and another that it asks for.
relation = partial(exact, reads=("results again",), reruns=True)


@lru_cache(4096)  # most verdicts are the same few
def plain(rule: str, arm: str, role: str, status: Status, why: str = "") -> Verdict:
    """A verdict that points at nothing."""
    return Verdict(rule, arm, role, status, why=why)


def diverged(
    rule: str, arm: str, role: str, symptom: str, at: At, got: str, expect: Expect, **more: Any
) -> Verdict:
    """A verdict that points at what is wrong; ``more`` are other fields of it."""
    return Verdict(rule, arm, role, "diverged", symptom, at, got, expect, **more)


def unequal(
    rule: str, arm: str, role: str, symptom: str, at: At, got: Any, want: Any, **more: Any
) -> Verdict:
    """A number that came in place of another."""
    return diverged(rule, arm, role, symptom, at, number(got), Is(bits(want)), **more)


def unlike(
    rule: str, arm: str, role: str, symptom: str, at: At, than: At, got: Any, want: Any, **more: Any
) -> Verdict:
    """The first number of an array that is not the one of another array, which is ``than``."""
    index = first(~same_bits(got, want))
    at, than = (msgspec.structs.replace(place, index=index) for place in (at, than))
    came, expect = number(got[index]), Same(than, number(want[index]))
    return diverged(rule, arm, role, symptom, at, came, expect, **more)


def first(bad: Any) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(int(i) for i in np.argwhere(bad)[0])


__all__ = [
    "Check",
    "Reads",
    "Rule",
    "bound",
    "diverged",
    "exact",
    "first",
    "number",
    "plain",
    "ratio",
    "relation",
    "same_bits",
    "seen",
    "unequal",
    "unlike",
    "whole",
]
