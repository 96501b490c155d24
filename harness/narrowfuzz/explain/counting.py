"""Counts how often a case shows a divergence, on data of many seeds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from narrowfuzz.case.arm import with_checkpoint
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import base_of
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.explain.switches import Switch
from narrowfuzz.judge.judge import Judge
from narrowfuzz.report.causes import DRAWS, Answer, Count, Role
from narrowfuzz.rules.table import rules_of
from narrowfuzz.trace.verdict import BAD, Verdict

#: The unchanged case must show the divergence on this number of draws before its absence after a
#: change proves anything: at 5 of 20, none of twenty is chance once in three hundred times.
_ENOUGH = 5


@dataclass
class DrawCounter:
    """Counts how often one divergence shows in a case and in its neighbours, until its time is
    up."""

    judge: Judge
    verdict: Verdict
    deadline: float

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def count(self, case: Case, arm: str = "") -> Count | None:
        """How many draws show the divergence. None if the case does not run on the arm, if the rule
        does not apply to it, or if the time is up before all draws are judged."""
        spec = case.spec
        rule, rung = rules_of(spec).get(self.verdict.rule), self.rung(spec, arm)
        if rule is None or not rung:
            return None
        arms = frozenset({base_of(spec).name, rung})
        shown = judged = otherwise = 0
        for one in _draws(case):
            if self.late:
                return None
            verdicts = self.judge.judge(one, [rule], arms, confirm=False).verdicts
            mine = [v for v in verdicts if (v.rule, v.arm) == (self.verdict.rule, rung)]
            bad = [v for v in mine if v.status in BAD]
            same = [v for v in bad if v.role == self.verdict.role]
            shows = any(v.symptom == self.verdict.symptom for v in same)
            shown += shows
            otherwise += bool(same) and not shows
            judged += bool(bad) or any(v.status == "ok" for v in mine)
        return Count(shown, judged, otherwise=otherwise)

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


def _draws(case: Case) -> Iterator[Case]:
    """The case with its own data, and with data of other seeds."""
    for i in range(DRAWS):
        data = msgspec.structs.replace(case.data, seed=(case.data.seed + i) % 2**32)
        yield msgspec.structs.replace(case, data=data)


def effect_of(counter: DrawCounter, own: Count, switch: Switch) -> Answer | None:
    """How the divergence shows after the switch, compared with ``own``, the count of the unchanged
    case; None if the time was up, or the rule does not judge the changed case."""
    count = counter.count(switch.case, switch.arm)
    return None if count is None else Answer(switch.words, count, role(own, count))


def role(own: Count, count: Count) -> Role:
    """Does the divergence need the condition without which ``count`` was taken?"""
    if own.shown >= _ENOUGH and count.silent:
        return "needed"
    if count.judged and 2 * count.shown * own.judged >= own.shown * count.judged:
        return "not needed"  # at least half as often
    return "cannot say"
