"""Finds vacuous passes: verdicts ``ok`` of a check that could not have failed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowfuzz.case.spec import Case
from narrowfuzz.power.falsify import NUMBERS
from narrowfuzz.power.perturbation import Perturbation, of_datum
from narrowfuzz.rules.rule import Reads, Rule
from narrowfuzz.trace.verdict import BAD, Verdict

#: The most examples of vacuous passes that are stored per rule and recipe.
_EXAMPLES = 3


@dataclass(frozen=True)
class Pass:
    """One verdict that was ``ok``."""

    rule: str
    arm: str
    role: str
    layer: str
    #: Titles of the perturbations that found something to falsify, and of those that the check
    #: noticed.
    tried: frozenset[str]
    noticed: frozenset[str]

    @property
    def vacuous(self) -> bool:
        """True if no perturbation that was tried would have made it fail."""
        return not self.noticed


@dataclass
class Passes:
    """Counts of the passes of one rule on one recipe."""

    number: int = 0
    vacuous: int = 0
    #: Perturbation -> number of passes it was tried on, and of those that did not notice it.
    tried: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    #: (case, arm, role, layer) of vacuous passes.
    examples: list[tuple[Case, str, str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.vacuous / self.number if self.number else 0.0

    def take(self, case: Case, found: Pass) -> None:
        self.number += 1
        self.vacuous += found.vacuous
        self.tried.update(found.tried)
        self.missed.update(found.tried - found.noticed)
        if found.vacuous and len(self.examples) < _EXAMPLES:
            self.examples.append((case, found.arm, found.role, found.layer))


#: (rule, recipe) -> its passes.
Table = dict[tuple[str, str], Passes]
#: Rule -> the perturbations of what it reads.
Falsifying = Mapping[str, Sequence[Perturbation]]


def falsifying(
    rules: Iterable[Rule], falsifies: Mapping[Reads, Sequence[Perturbation]]
) -> Falsifying:
    """For each rule, the perturbations of everything that it reads."""
    return {
        rule.name: (
            *(one for read in rule.reads for one in falsifies[read]),
            *(of_datum(numbers, datum) for datum in rule.data for numbers in NUMBERS),
        )
        for rule in rules
    }


def probe(
    check: Callable[[Any], Iterable[Verdict]], evidence: Any, falsify: Falsifying, layer: str = ""
) -> Iterator[Pass]:
    """Every pass of a check on this evidence, with the perturbations tried and noticed.

    A perturbation falsifies one arm's observations of a kind all at once, in every role: applying
    the check once more then shows for all verdicts on that arm whether they notice it. Verdicts are
    matched by their order; if their number changes, one bad verdict counts for all.
    """
    before = _by_arm(check(evidence))
    for arm, verdicts in before.items():
        rules = sorted({v.rule for v in verdicts if v.status == "ok"})
        found: dict[str, list[bool]] = {}
        for perturbation in dict.fromkeys(p for rule in rules for p in falsify[rule]):
            other = perturbation.change(evidence, arm)
            if other is not None:
                after = _by_arm(check(other)).get(arm, [])
                found[perturbation.title] = _noticed(verdicts, after)
        for i, verdict in enumerate(verdicts):
            if verdict.status == "ok":
                own = {p.title for p in falsify[verdict.rule]} & found.keys()
                like = [j for j, v in enumerate(verdicts) if _alike(v, verdict)]
                noticed = frozenset(title for title in own if found[title][i])
                # not tried on this verdict but on a like one: e.g. it compared operands, the other
                # one results
                others = {t for t in own - noticed if any(found[t][j] for j in like)}
                yield Pass(
                    verdict.rule,
                    arm,
                    verdict.role,
                    verdict.at.layer or layer,
                    frozenset(own - others),
                    noticed,
                )


def _alike(x: Verdict, y: Verdict) -> bool:
    return (x.rule, x.role, x.at.layer) == (y.rule, y.role, y.at.layer)


def _by_arm(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    arms: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        arms[verdict.arm].append(verdict)
    return arms


def _noticed(before: list[Verdict], after: list[Verdict]) -> list[bool]:
    bad = [verdict.status in BAD for verdict in after]
    return bad if len(before) == len(after) else [any(bad)] * len(before)
