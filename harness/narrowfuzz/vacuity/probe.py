"""Which passes of a check could not have failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowfuzz.vacuity.perturbation import Perturbation
from narrowfuzz.verdict import BAD, Verdict


@dataclass(frozen=True)
class Pass:
    """One verdict that was ``ok``."""

    oracle: str
    arm: str
    role: str
    layer: str
    #: Titles of the perturbations that there was something for, and of those it noticed.
    tried: frozenset[str]
    noticed: frozenset[str]

    @property
    def vacuous(self) -> bool:
        """True if nothing that was tried would have made it fail."""
        return not self.noticed


def probe(
    check: Callable[[Any], Iterable[Verdict]],
    evidence: Any,
    relevant: Mapping[str, Sequence[Perturbation]],
    everything: Sequence[Perturbation] = (),
    layer: str = "",
) -> Iterator[Pass]:
    """Every pass of a check on this evidence. ``everything`` is tried on rules that ``relevant``
    does not know.

    A perturbation falsifies one arm's observations of a kind all at once, in every role: one more
    application of the check then tells of all its verdicts on that arm. They are matched by their
    order; where their number changes, any that is bad speaks for all.
    """
    before = _by_arm(check(evidence))
    for arm, verdicts in before.items():
        rules = {v.oracle for v in verdicts if v.status == "ok"}
        found: dict[str, list[bool]] = {}
        wanted = dict.fromkeys(p for rule in sorted(rules) for p in relevant.get(rule, everything))
        for perturbation in wanted:
            other = perturbation.change(evidence, arm)
            if other is not None:
                after = _by_arm(check(other)).get(arm, [])
                found[perturbation.title] = _noticed(verdicts, after)
        for i, verdict in enumerate(verdicts):
            if verdict.status == "ok":
                own = {p.title for p in relevant.get(verdict.oracle, everything)} & found.keys()
                like = [j for j, v in enumerate(verdicts) if _alike(v, verdict)]
                noticed = frozenset(title for title in own if found[title][i])
                # another verdict's business, as results are where this one compared operands
                others = {t for t in own - noticed if any(found[t][j] for j in like)}
                yield Pass(
                    verdict.oracle, arm, verdict.role, verdict.at.layer or layer,
                    frozenset(own - others), noticed,
                )  # fmt: skip


def _alike(x: Verdict, y: Verdict) -> bool:
    return (x.oracle, x.role, x.at.layer) == (y.oracle, y.role, y.at.layer)


def _by_arm(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    arms: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        arms[verdict.arm].append(verdict)
    return arms


def _noticed(before: list[Verdict], after: list[Verdict]) -> list[bool]:
    bad = [verdict.status in BAD for verdict in after]
    return bad if len(before) == len(after) else [any(bad)] * len(before)
