"""What the extension answers is recorded and compared, call by call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fresh import HERE, python

SCRIPT = HERE.parent / "benchmarks" / "te_calls.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("calls") / "calls.pt"
    assert "539 calls of TransformerEngine 2.20.2" in python(SCRIPT, "record", file).stdout
    return file


def test_every_call_is_answered(recorded: Path) -> None:
    answers = torch.load(recorded)["answers"]
    assert [name for name, answer in answers.items() if isinstance(answer, str)] == []
    assert {name.split()[0] for name in answers} >= {"quantize", "update", "rmsnorm", "gemm"}


@pytest.mark.heavy
def test_other_bits_and_refusals_are_told_and_nothing_else(recorded: Path, tmp_path: Path) -> None:
    day = torch.load(recorded)
    codes = day["answers"]["quantize delayed e4m3 1.0 normal bf16"]["codes"]
    codes[3, 5] += 2
    value = day["answers"]["gemm none bf16 TN"]["value"]
    value[0, 0] = -0.0
    day["answers"]["fp8_transpose"] = "RuntimeError: no"
    del day["answers"]["softmax bf16"]["plain"]
    other = tmp_path / "other.pt"
    torch.save(day, other)
    lines = python(SCRIPT, "compare", other, code=1).stdout.splitlines()
    assert lines[0].startswith("recorded: TransformerEngine 2.20.2 (its Python on the emulated")
    assert lines[-1] == "4 results of 539 calls differ"
    assert lines[1] == "fp8_transpose: recorded RuntimeError: no, here a result"
    assert lines[2].startswith("gemm none bf16 TN: value: 1 of 1536 differ, by up to ")
    assert "differ, by up to 2 in the last place; at [3, 5]" in lines[3]
    assert lines[4] == "softmax bf16: plain: only here"
