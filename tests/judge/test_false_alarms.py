"""Cases that were false alarms once: a fault of ours, or a legal difference. They stay silent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import on_transformer_engine
from kernels import skip_without_kernel
from narrowfuzz.case.spec import load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from samples import every_recipe

ALARMS = json.loads((Path(__file__).parents[1] / "false_alarms.json").read_text())
#: TransformerEngine's are judged in a process of their own.
ON_TE = [alarm for alarm in ALARMS if alarm["case"]["spec"]["recipe"].startswith("te.")]
HERE_TOO = [alarm for alarm in ALARMS if alarm not in ON_TE]


def by_cost() -> Iterator[Any]:
    """Of compiled cases the first alone is judged each time: others take up to 20 s each."""
    compiled = [
        alarm for alarm in HERE_TOO if alarm["case"]["spec"].get("compile", "none") != "none"
    ]
    for alarm in HERE_TOO:
        marks = [pytest.mark.heavy] * (alarm in compiled[1:])
        yield pytest.param(alarm, id=alarm["why"], marks=marks)


@pytest.mark.parametrize("alarm", by_cost())
def test_what_was_no_bug_is_not_called_one(alarm: dict[str, Any]) -> None:
    case = load_case(json.dumps(alarm["case"]).encode())
    if not case.spec.layer:
        skip_without_kernel(case)
    judgement = Judge(every_recipe(), load_ledger()).judge(case)
    assert judgement.ran
    assert [v.sentence() for v in judgement.causes] == []


@pytest.mark.heavy
def test_what_was_no_bug_of_transformer_engine_is_not_called_one(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([alarm["case"] for alarm in ON_TE]))
    told = [json.loads(line) for line in on_transformer_engine("judge_te_cases.py", file)]
    assert dict(zip([alarm["why"] for alarm in ON_TE], told, strict=True)) == {
        alarm["why"]: [] for alarm in ON_TE
    }
