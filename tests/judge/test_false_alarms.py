"""Cases that were false alarms once: a fault of ours, or a legal difference. They stay silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernels import skip_without_kernel
from narrowfuzz.case.spec import load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.recipe.recipe import load_every
from te_on_cpu.environment import DEFAULT, ensure

HERE = Path(__file__).parents[1]
ALARMS = json.loads((HERE / "false_alarms.json").read_text())
#: TransformerEngine's are judged in a process of their own.
ON_TE = [alarm for alarm in ALARMS if alarm["case"]["spec"]["recipe"].startswith("te.")]
HERE_TOO = [alarm for alarm in ALARMS if alarm not in ON_TE]


@pytest.mark.parametrize("alarm", HERE_TOO, ids=lambda alarm: alarm["why"])
def test_what_was_no_bug_is_not_called_one(alarm: dict[str, Any]) -> None:
    case = load_case(json.dumps(alarm["case"]).encode())
    if not case.spec.layer:
        skip_without_kernel(case)
    judgement = Judge(load_every(), load_ledger()).judge(case)
    assert judgement.ran
    assert [v.sentence() for v in judgement.causes] == []


@pytest.mark.heavy
def test_what_was_no_bug_of_transformer_engine_is_not_called_one(tmp_path: Path) -> None:
    try:
        ensure(DEFAULT)
    except ValueError as why:
        pytest.skip(str(why))
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([alarm["case"] for alarm in ON_TE]))
    path = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, str(HERE / "judge_te_cases.py"), str(file)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert dict(zip([alarm["why"] for alarm in ON_TE], told, strict=True)) == {
        alarm["why"]: [] for alarm in ON_TE
    }
