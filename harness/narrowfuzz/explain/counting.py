"""Counts how often a case shows a divergence, on data of many seeds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Literal

from narrowfuzz.case.arm import with_checkpoint
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import base_of
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.explain.switches import Switch
from narrowfuzz.judge.judge import Judge
from narrowfuzz.report.explanation import DRAWS, Answer, Count, Role
from narrowfuzz.rules.table import rules_of
from narrowfuzz.trace.verdict import BAD, Verdict

#: What a rule finds in a draw: the divergence; something else wrong with the same result; neither.
Outcome = Literal["shown", "otherwise", "clean", "not judged"]

#: The unchanged case must show the divergence on this number of draws before its absence after a
#: change proves anything: at 5 of 20, none of twenty is chance once in three hundred times.
_ENOUGH = 5


@dataclass
class DrawCounter:
    """Counts how often one divergence shows in a case and in its neighbours, until its time is
    up."""

    judge: Judge
    #: The same, with the ledger but for the finding's own entry.
    informed: Judge
    verdict: Verdict
    deadline: float
    #: How a case is compiled -> the longest that a count of such a case took, in seconds.
    took: dict[str, float] = field(default_factory=dict)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def late_for(self, case: Case) -> bool:
        """Is there too little time for another case that is compiled like this one? A compiler is
        not interrupted."""
        return time.monotonic() + self.took.get(case.spec.compile, 0.0) > self.deadline

    def count(self, case: Case, arm: str = "") -> Count | None:
        """How many draws show the divergence. None if the case does not run on the arm, if the rule
        does not apply to it, or if the time is up before all draws are judged."""
        outcomes: list[Outcome] = []
        start = time.monotonic()
        for one in map(case.reseeded, range(DRAWS)):
            outcome = None if self.late else self._outcome(one, arm)
            if outcome is None:
                return None
            outcomes.append(outcome)
        took = self.took.get(case.spec.compile, 0.0)
        self.took[case.spec.compile] = max(took, time.monotonic() - start)
        judged = len(outcomes) - outcomes.count("not judged")
        return Count(outcomes.count("shown"), judged, otherwise=outcomes.count("otherwise"))

    def example(self, case: Case) -> Case | None:
        """The first draw that shows the divergence; None if none does before the time is up."""
        draws = map(case.reseeded, range(DRAWS))
        shown = (one for one in draws if not self.late and self._outcome(one) == "shown")
        return next(shown, None)

    def another(self, case: Case, arm: str = "") -> str:
        """The sentence of what any rule finds on the same arm and is no known issue, in the first
        draw that shows something; "" if none does before the time is up."""
        rung = self.rung(case.spec, arm)
        arms = frozenset({base_of(case.spec).name, rung})
        for one in map(case.reseeded, range(DRAWS)):
            if self.late:
                break
            for verdict in self.informed.judge(one, None, arms).causes:
                if verdict.arm == rung:
                    return verdict.sentence()
        return ""

    def _outcome(self, case: Case, arm: str = "") -> Outcome | None:
        """What the rule finds in one draw on the arm; None if it does not apply there."""
        spec = case.spec
        rule, rung = rules_of(spec).get(self.verdict.rule), self.rung(spec, arm)
        if rule is None or not rung:
            return None
        arms = frozenset({base_of(spec).name, rung})
        verdicts = self.judge.judge(case, [rule], arms, confirm=False).verdicts
        mine = [v for v in verdicts if (v.rule, v.arm) == (self.verdict.rule, rung)]
        bad = [v for v in mine if v.status in BAD]
        same = [v.symptom for v in bad if v.role == self.verdict.role]
        if same:
            return "shown" if self.verdict.symptom in same else "otherwise"
        if "operators" in rule.reads:  # another operator's result says nothing of this one
            mine = bad = [v for v in mine if v.role == self.verdict.role]
        return "clean" if bad or any(v.status == "ok" for v in mine) else "not judged"

    def rung(self, spec: Spec, arm: str = "") -> str:
        """The name of ``arm`` if it is a rung of the Spec, else ""; without ``arm``, that of the
        finding, or, if the Spec is no longer compiled, recomputed or on ranks, of the last rung
        with the finding's compiler, or else of the last rung."""
        rungs = {one.name: one for one in self.judge.rungs(spec)}
        found = ARMS[self.verdict.arm]
        wanted = arm or self.verdict.arm
        if found.recomputes and arm and spec.checkpoint != "none":
            wanted = with_checkpoint(ARMS[arm], spec.checkpoint).name
        if wanted in rungs:
            return wanted
        if arm:
            return ""
        alike = [name for name, one in rungs.items() if one.compiler == found.compiler]
        return ([base_of(spec).name, *(alike or rungs)])[-1]


def effect_of(counter: DrawCounter, own: Count, switch: Switch) -> Answer | None:
    """How the divergence shows after the switch, compared with ``own``, the count of the unchanged
    case; None if the time was up, or the rule does not judge the changed case. What seems to be
    needed is not if other data shows the divergence without it, and is open if another rule finds
    something in its place. The context of the switch holds meanwhile."""
    with switch.around():
        return _effect_of(counter, own, switch)


def _effect_of(counter: DrawCounter, own: Count, switch: Switch) -> Answer | None:
    count = counter.count(switch.case, switch.arm)
    if count is None:
        return None
    answer = Answer(switch.words, count, role(own, count))
    if answer.role == "not needed":
        return answer
    for words, case in switch.other_data.items():
        other = counter.count(case, switch.arm)
        if other is not None and role(own, other) == "not needed":
            return Answer(switch.words, other, "not needed", data=words)
    if answer.role == "cannot say" and count.judged:
        return answer
    instead = counter.another(switch.case, switch.arm)
    if counter.late:
        return None
    if instead:
        return replace(answer, role="cannot say", instead=instead)
    return answer if count.judged else replace(answer, role="nothing judged")


def role(own: Count, count: Count) -> Role:
    """Does the divergence need the condition without which ``count`` was taken?"""
    if own.shown >= _ENOUGH and count.silent:
        return "needed"
    if count.judged and 2 * count.shown * own.judged >= own.shown * count.judged:
        return "not needed"  # at least half as often
    return "cannot say"
