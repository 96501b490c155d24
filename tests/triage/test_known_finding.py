"""Which known issue a finding is, asked once more of its smallest example."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Entry, Ledger, load_ledger
from narrowfuzz.ledger.severity import weighed
from narrowfuzz.rules import RULES
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.finding import report
from narrowfuzz.triage.known import known_issue
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import recipes

RECIPES = recipes()
LEDGER = load_ledger()
BARE = Judge(RECIPES, Ledger([]), frozenset({"eager"}))
MX = Spec(recipe="torchao.mxfp8.rceil", backend="wrapper", m=32, k=32, n=32, bias=True)
BIASED = Case(spec=MX, data=DataSpec())
OWN_FORWARD = Case(
    spec=Spec(recipe="torchao.float8.rowwise", backend="real", model="own_forward"), data=DataSpec()
)


def cause(case: Case, rule: str) -> Verdict:
    (found,) = [v for v in BARE.judge(case).causes if v.rule == rule]
    return found


def asked(case: Case, verdict: Verdict, ledger: Ledger = LEDGER) -> Entry | None:
    return known_issue(BARE, ledger, case, verdict, RULES)


def without(ids: Iterable[str]) -> Ledger:
    return Ledger([entry for entry in LEDGER.entries if entry.id not in ids])


@pytest.mark.parametrize("rule", ["O5", "contract"])
def test_an_entry_that_works_by_a_deviation_is_found(rule: str) -> None:
    verdict = cause(BIASED, rule)
    entry = asked(BIASED, verdict)
    assert entry is not None and entry.id == "mx-wrapper-drops-bias"
    assert asked(BIASED, verdict, without({entry.id})) is None


def test_an_entry_that_names_a_fingerprint_is_found() -> None:
    verdict = cause(OWN_FORWARD, "census")
    entry = asked(OWN_FORWARD, verdict)
    assert entry is not None and entry.id == "float8-swap-drops-own-forward"
    assert asked(OWN_FORWARD, verdict, without({entry.id})) is None


def test_what_no_entry_explains_is_none_though_an_entry_holds_for_the_case() -> None:
    """The bias is ignored there, too: that does not explain a wrong scale."""
    from narrowfuzz.plants.registry import builtin_plants

    with builtin_plants()["mx-scale-byte-plus-one"].plant():
        judge = Judge(RECIPES, Ledger([]), frozenset({"eager"}))
        verdict = next(v for v in judge.judge(BIASED).causes if v.rule == "O3")
        assert LEDGER.deviations(BIASED)
        assert known_issue(judge, LEDGER, BIASED, verdict, RULES) is None


def test_what_comes_and_goes_by_chance_is_explained_by_none() -> None:
    """A divergence that this case does not show now: that an entry is followed meanwhile says
    nothing about it."""
    shown = cause(BIASED, "O5")
    gone = replace(shown, rule="O2", role="operand", symptom="rounded code")
    assert "known" in {v.status for v in Judge(RECIPES, LEDGER).judge(BIASED).verdicts}
    assert asked(BIASED, gone) is None


@pytest.mark.heavy
def test_a_finding_has_the_severity_of_the_issue_that_it_is(scripts: RunScript) -> None:
    """The rarity of a use stands in the entry alone: what was measured would make it high."""
    verdict = cause(OWN_FORWARD, "census")
    once = partial(triage, BARE, OWN_FORWARD, verdict, seconds=2.0, scripts=scripts)
    told = once(unfiltered_ledger=LEDGER)
    entry = next(e for e in LEDGER.entries if e.id == told.finding.known_issue)
    assert told.finding.severity == entry.severity == "medium"
    assert entry.id in told.finding.why_severity and entry.weighed.why in told.finding.why_severity
    assert told.finding.fingerprint == fingerprint(verdict, "torchao.float8")
    said = report(told.finding, "again")
    assert f"the severity is that issue's, not measured here: narrowfuzz known {entry.id}" in said
    alone = once(unfiltered_ledger=without({entry.id})).finding
    assert (alone.known_issue, alone.severity) == ("", "high") and entry.id not in report(alone, "")
    unasked = once().finding
    assert unasked.known_issue is None and unasked.id == alone.id == told.finding.id


@pytest.mark.parametrize("entry", [*LEDGER.entries, *LEDGER.unnamed], ids=lambda e: e.id)
def test_the_reason_of_an_entry_ends_with_its_severity_less_the_steps(entry: Entry) -> None:
    level = ("low", "medium", "high")
    why = entry.weighed.why
    how = weighed(entry.symptom, entry.effect, entry.data, entry.use, cured=entry.cured_by)
    assert entry.severity == how.severity
    if entry.cured:  # by a release that the reader may not have
        assert entry.cured in why and "every release" not in why
    (start,) = [name for name in level if f": {name}" in why]
    steps = why.count("one step less") + 2 * why.count("two steps less")
    assert level[max(0, level.index(start) - steps)] == entry.severity
