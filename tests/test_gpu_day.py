"""``make gpu``: a day in steps that goes on where it stopped, and the table that it fills."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fresh import python

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_day  # noqa: E402
import gpu_steps  # noqa: E402
import gpu_table  # noqa: E402
from gpu_day import answer_of  # noqa: E402
from gpu_steps import Part, Step  # noqa: E402


def says(name: str, code: int, *, minutes: float = 0.1) -> Part:
    return Part(name, minutes, (sys.executable, "-c", f"print('{name}'); raise SystemExit({code})"))


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Play a day of these steps: its exit code and ``gpu.json``."""

    def play(*steps: Step, argv: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu_day, "STEPS", steps)
        monkeypatch.setattr(gpu_day, "environment", lambda out, wheels: dict(os.environ))
        out = ("--simulate", "--out", str(tmp_path / "day"), *argv)
        monkeypatch.setattr(sys, "argv", ["gpu_day.py", *out])
        return gpu_day.main(), json.loads((tmp_path / "day" / "gpu.json").read_text())

    return play


def test_a_no_ends_the_day(day: Any, capsys: pytest.CaptureFixture[str]) -> None:
    steps = (Step("a", "A?", (says("one", 1),)), Step("b", "B?", (says("two", 0),)))
    code, told = day(*steps)
    assert code == 1 and list(told["parts"]) == ["one"] and not told["parts"]["one"]["good"]
    assert "go on with --go-on" in capsys.readouterr().out
    code, told = day(*steps, argv=("--go-on",))
    assert code == 1 and told["answers"] == {"A?": "no", "B?": "yes"}
    code, told = day(Step("a", "A?", (says("one", 0),)), steps[1])
    assert code == 0 and told["answers"] == {"A?": "yes", "B?": "yes"}  # a no is asked again


def test_a_day_goes_on_where_it_stopped(day: Any) -> None:
    short = Step("a", "A?", (says("one", 0),))
    long = Step("b", "B?", (says("two", 0, minutes=9.0),))
    code, told = day(short, long, argv=("--call", "4"))
    assert code == 3 and list(told["parts"]) == ["one"]
    code, told = day(short, long)
    assert code == 0 and list(told["parts"]) == ["one", "two"]
    assert told["answers"] == {"A?": "yes", "B?": "yes"}


def test_what_judged_nothing_or_missed_something_is_no_yes(tmp_path: Path) -> None:
    step = Step("a", "A?", (says("score", 0),))
    found = {"faults": [{"id": "x", "found": False}, {"id": "y", "found": True}]}
    (tmp_path / "score.json").write_text(json.dumps(found))
    told = gpu_day.done(step.parts[0], 1.0, "cpu", tmp_path, {})
    assert told["missed"] == ["x"] and answer_of(step, {"score": told}) == "no"
    assert answer_of(step, {}) == "not asked"


def test_a_campaign_is_judged_by_what_it_ran_and_found(tmp_path: Path) -> None:
    def judged(cases: int, *fingerprints: str) -> bool:
        found = [{"recipe": "", "arm": "", "sentence": "", "fingerprint": f} for f in fingerprints]
        some = {"findings": found, "suspected": [], "cases": cases, "lost_workers": 0}
        some |= {"specs": 1, "compiles": 0, "seconds": 1}
        writes = tmp_path / "writes.py"
        writes.write_text(
            f"import json, os\nout = {str(tmp_path / 'run')!r}\nos.makedirs(out)\n"
            f"json.dump({some!r}, open(out + '/summary.json', 'w'))\n"
        )
        part = gpu_steps.run("run", 1.0, "torch.bf16")
        part = replace(part, command=(sys.executable, str(writes)))
        return bool(gpu_day.done(part, 1.0, "cpu", tmp_path, {})["good"])

    assert judged(5) and not judged(0)
    assert judged(5, "contract--forward--eager--refusal names no layer--x")
    assert not judged(5, "O5--output--eager--wrong value--x")


def test_a_part_that_hangs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "BESIDE", 0.5)
    slow = Part("slow", 0.0, (sys.executable, "-c", "import time; time.sleep(60)"))
    told = gpu_day.done(slow, 0.0, "cpu", tmp_path, {})
    assert told["code"] == gpu_day.CUT_OFF and not told["good"] and told["seconds"] < 30


def test_a_day_can_be_carried_to_another_machine(
    day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    steps = (Step("a", "A?", (says("one", 0),)), Step("b", "B?", (says("two", 1),)))
    assert day(*steps)[0] == 1 and (tmp_path / "day.tgz").exists()
    shutil.rmtree(tmp_path / "day")
    code, told = day(*steps, argv=("--resume", str(tmp_path / "day.tgz")))
    assert code == 1 and list(told["parts"]) == ["one", "two"]


def test_the_table_says_what_is_on_record() -> None:
    text = gpu_table.PAGE.read_text()
    kept = text.partition(gpu_table.BEGIN)[2].partition(gpu_table.END)[0]
    assert kept == gpu_table.table(gpu_table.load())


def test_a_record_becomes_a_column_and_each_question_a_row() -> None:
    where = {"torch": "2.11", "torchao": "0.18", "date": "2026-11-22"}
    records = {"simulated": {**where, "answers": {"A?": "yes"}},
               "H100": {**where, "answers": {"A?": "no", "B?": "yes"}}}  # fmt: skip
    head, _, first, second = gpu_table.table(records).splitlines()
    assert "simulated (torch 2.11" in head and "H100 (torch 2.11" in head
    assert (first, second) == ("| A? | yes | no |", "| B? | not yet | yes |")


@pytest.mark.heavy  # `make nightly` plays the day, too
def test_a_slice_of_the_simulated_day_is_answered_with_yes(tmp_path: Path) -> None:
    only = [text for part in ("probe", "float8") for text in ("--only", part)]
    options = ("--simulate", "--minutes", "0.5", *only, "--out", tmp_path)
    python(ROOT / "benchmarks" / "gpu_day.py", *options, seconds=500)
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["parts"]["float8"]["cases"] > 0 and not told["parts"]["float8"]["findings"]
    assert set(told["answers"].values()) == {"yes"}
