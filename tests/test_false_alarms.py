"""Cases that were false alarms once: a fault of ours, or a legal difference. They stay silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.case import load_case
from harness.environment import prepare, settle
from harness.judge import Judge
from harness.ledger import load_ledger
from harness.recipe import load_recipes, load_stateful

prepare()
settle()

ALARMS = json.loads(Path(__file__).with_name("false_alarms.json").read_text())


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda alarm: alarm["why"])
def test_what_was_no_bug_is_not_called_one(alarm: dict[str, Any]) -> None:
    case = load_case(json.dumps(alarm["case"]).encode())
    judgement = Judge(load_recipes(), load_ledger(), stateful=load_stateful()).judge(case)
    assert judgement.ran
    assert [v.sentence() for v in judgement.causes] == []
