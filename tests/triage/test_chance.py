"""What strikes by chance is one finding, not a suspicion for every rule that it broke."""

from __future__ import annotations

import pytest
from narrowfuzz.arms.available import select_arms
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, bits
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.finding import report
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import recipes

FAULT = "bit-of-scale-flips"
CASE = Case(
    spec=Spec(recipe="torchao.float8.rowwise", backend="emulated", m=4, k=16, n=8),
    data=DataSpec(seed=2),
)
#: One of the rules that compare, broken once, by a flip that does not come again.
SEEN = Verdict(
    "O3", "eager", "output", "diverged", "scale value",
    At(what="scale", name="output", side="b", index=(0, 0)), "585.142883", Is(bits(512.0)),
)  # fmt: skip


def judge() -> Judge:
    return Judge(recipes(), Ledger([]), select_arms(()))


def test_a_case_that_does_not_repeat_itself_is_the_finding(scripts: RunScript) -> None:
    with builtin_faults()[FAULT].plant():
        result = triage(judge(), CASE, SEEN, plant=("", FAULT), scripts=scripts, seconds=3.0)
    finding = result.finding
    assert result.confirmed and finding.rule == "O1"
    assert finding.seen_as and finding.seen_as[0].startswith("O3--operand--eager--scale value")
    assert finding.seen_as[0] in report(finding, "replay")


@pytest.mark.parametrize("rule", ["O3", "O1"])
def test_without_chance_it_stays_suspected(rule: str, scripts: RunScript) -> None:
    """A script that passes explains nothing by itself."""
    from dataclasses import replace

    result = triage(judge(), CASE, replace(SEEN, rule=rule), scripts=scripts, seconds=1.0)
    assert not result.confirmed and not result.finding.seen_as
