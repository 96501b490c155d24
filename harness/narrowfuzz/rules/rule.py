"""The record of a rule, the kinds of case that it judges, and helpers that every rule file uses."""

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


#: The data of a case that a rule reads. Each kind of data has perturbations that falsify it, to
#: test whether the rule notices (``power/reads.py``; for a library's own layers
#: ``power/schedules.py``).
Reads = Literal[
    "run",  # how a run ended
    "conversion",  # what converting changed in the model
    "results",  # outputs and gradients
    "finite",  # whether they are finite
    "nan",  # whether they are NaN
    "bias gradient",
    "operands",  # of GEMMs, as observed
    "scales",  # of these operands
    "amax",  # of these operands
    "second copies",  # of a tensor that is quantised for a second GEMM
    "recomputed",  # operands of the GEMMs that a checkpoint recomputed
    "statistics",  # what attention saves for its backward
    "results again",  # of a rerun that the rule requests, as are the next two
    "operands again",
    "scales again",
    "casts",  # of a library's own layers, as are all that follow except the last
    "formats",  # of products
    "states",  # scales and windows of maxima
    "kept state",  # of a recipe that must keep none
    "pending",  # what the library has set aside for a later step
    "after other models",  # a run in a process in which other models ran before
    "results on ranks",
    "states on ranks",
    "operators",  # results of calls of operators
]


@dataclass(frozen=True)
class Rule:
    """A rule over traces: its strength, the data it reads, and the kinds of case it judges. Its
    claim is written down in ``rules.toml``."""

    strength: Strength
    name: str
    check: Check
    #: Names of the rules whose divergence explains a divergence of this rule: on the same role if
    #: this rule judges layers, on the same arm if it judges the whole run (exceptions:
    #: ``causes.py``).
    upstream: frozenset[str] = frozenset()
    reads: tuple[Reads, ...] = ("results",)
    #: Data that only this rule reads, each with its own falsification (``datum.py``).
    data: tuple[Datum[Any], ...] = ()
    level: Level = "C"
    #: ``layer``: judges each linear by its arguments and results. ``case``: judges the whole run.
    scope: Literal["layer", "case"] = "layer"
    #: True: requests another run, on transformed data or of a changed Spec.
    reruns: bool = False
    #: True: also judges runs that did not finish.
    unfinished: bool = False
    #: Results of which each is compared with the others.
    exchanged: frozenset[str] = frozenset()
    #: The kinds of case that it judges.
    cases: tuple[Kind, ...] = CONVERTED


exact, bound = partial(Rule, "exact"), partial(Rule, "bound")
ratio = partial(Rule, "ratio", scope="case")
#: Exact rules: over the whole run (``whole``), or over the observed operands (``seen``).
whole, seen = partial(exact, scope="case"), partial(exact, level="A")
#: Exact relations between the run and another run that the rule requests.
relation = partial(exact, reads=("results again",), reruns=True)


@lru_cache(4096)  # most verdicts are the same few
def plain(rule: str, arm: str, role: str, status: Status, why: str = "") -> Verdict:
    """A verdict without address, value or expectation."""
    return Verdict(rule, arm, role, status, why=why)


def diverged(
    rule: str, arm: str, role: str, symptom: str, at: At, got: str, expect: Expect, **more: Any
) -> Verdict:
    """A divergence: a verdict that points at what is wrong. ``more`` sets its other fields."""
    return Verdict(rule, arm, role, "diverged", symptom, at, got, expect, **more)


def unequal(
    rule: str, arm: str, role: str, symptom: str, at: At, got: Any, want: Any, **more: Any
) -> Verdict:
    """A divergence: the number ``got`` in place of ``want``."""
    return diverged(rule, arm, role, symptom, at, number(got), Is(bits(want)), **more)


def diverged_from(
    rule: str, arm: str, role: str, symptom: str, at: At, than: At, got: Any, want: Any, **more: Any
) -> Verdict:
    """A divergence at the first element of ``got`` that differs from ``want``, the array at the
    address ``than``."""
    index = first(~same_bits(got, want))
    at, than = (msgspec.structs.replace(place, index=index) for place in (at, than))
    actual, expect = number(got[index]), Same(than, number(want[index]))
    return diverged(rule, arm, role, symptom, at, actual, expect, **more)


def first(bad: Any) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(int(i) for i in np.argwhere(bad)[0])


__all__ = [
    "Check",
    "Reads",
    "Rule",
    "bound",
    "diverged",
    "diverged_from",
    "exact",
    "first",
    "number",
    "plain",
    "ratio",
    "relation",
    "same_bits",
    "seen",
    "unequal",
    "whole",
]
