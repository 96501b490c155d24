"""Finds the known issue that explains a finding of a judge that knows no issues."""

from __future__ import annotations

from narrowfuzz.case.spec import Case
from narrowfuzz.judge.fold import Judgement
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Entry, Ledger
from narrowfuzz.rules.rule import Rule
from narrowfuzz.trace.verdict import Verdict, fingerprint


def known_issue(
    judge: Judge, ledger: Ledger, case: Case, verdict: Verdict, rules: tuple[Rule, ...]
) -> Entry | None:
    """The entry of the ledger that explains this divergence of the case: by its fingerprint, or
    because ``rules`` no longer see the divergence once they follow the as-built deviation that the
    entry documents. None if no entry does; a divergence that comes and goes by chance is explained
    by none."""
    informed = judge.with_ledger(ledger)
    entries = {entry.id: entry for entry in (*ledger.entries, *ledger.unnamed)}
    if by_name := informed.known_as(case, verdict):
        return entries[by_name]
    if not ledger.deviations(judge.as_known(case)):
        return None
    name = fingerprint(verdict, judge.family(case.spec))
    arms = judge.beneath(case.spec, verdict.arm)

    def judged(known: Ledger) -> Judgement:
        return judge.with_ledger(known).judge(case, rules, arms, confirm=False)

    judgement = judged(ledger)
    if judgement.shows(name):
        return None
    followed = [v for v in judgement.verdicts if v.status == "known"]
    place = verdict.rule, verdict.arm, verdict.role
    if own := [v for v in followed if (v.rule, v.arm, v.role) == place]:
        return entries[own[0].explained_by]
    for by in dict.fromkeys(v.explained_by for v in followed):
        if not judged(Ledger([entries[by]], device=ledger.device)).shows(name):
            return entries[by] if judged(Ledger([])).shows(name) else None
    return None
