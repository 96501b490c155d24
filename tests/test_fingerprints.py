"""Fingerprints are identities: findings, ledger entries and other people's notes name them, so
their words stay. ``python tests/test_fingerprints.py`` writes them down afresh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernels import skip_unless_every_arm_runs
from narrowfuzz.case.spec import Case, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules import rules_of
from narrowfuzz.trace.verdict import BAD, fingerprint
from samples import recipes

prepare()
settle()

HERE = Path(__file__).parent
FROZEN: dict[str, list[str]] = json.loads((HERE / "fingerprints.json").read_text())
CASES = {
    name: load_case(json.dumps(case).encode())
    for name, case in json.loads((HERE / "fault_cases.json").read_text()).items()
}


#: What memory holds that nobody wrote is another thing each time: here, one rule tells.
UNWRITTEN = {"empty-gemm-unwritten": "O1"}


def fingerprints(case: Case, fault: str) -> list[str]:
    """Of every bad verdict that the fault alone brings, causes or not."""

    def bad() -> set[str]:
        judgement = Judge(recipes(), Ledger([])).judge(case)
        rules = [UNWRITTEN[fault]] if fault in UNWRITTEN else rules_of(case.spec)
        told = [v for v in judgement.verdicts if v.status in BAD and v.rule in rules]
        return {fingerprint(v, judgement.family) for v in told}

    clean = bad()
    with builtin_faults()[fault].plant():
        return sorted(bad() - clean)


@pytest.mark.heavy  # the first fingerprint of each rule is frozen in tests/rules
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_faults_fingerprints_keep_their_words(name: str) -> None:
    case = CASES[name]
    skip_unless_every_arm_runs(case)
    assert fingerprints(case, name) == FROZEN[name]


def test_every_fault_case_is_frozen() -> None:
    assert set(FROZEN) == set(CASES)


if __name__ == "__main__":
    found = {name: fingerprints(case, name) for name, case in sorted(CASES.items())}
    (HERE / "fingerprints.json").write_text(json.dumps(found, indent=1) + "\n")
