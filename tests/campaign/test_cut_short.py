"""Campaigns and workers that end early: an abort, a lost device, an exception of ours, Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from narrowfuzz.campaign.campaign import Campaign
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.raised import innermost
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.triage.verify import RunScript, run_script
from rich.console import Console
from test_campaign import EAGER, FLOAT8, campaign, finish, group, start, wait_for
from test_found import supervisor

pytestmark = pytest.mark.xdist_group("campaign")


#: In a worker: the command asks a plan, too.
RAISES = """
import dataclasses, multiprocessing
from narrowfuzz.recipe.recipe import load_recipes
honest = load_recipes()["torch.fp32"]
def plan(spec):
    if multiprocessing.parent_process() is None:
        return honest.plan(spec)
    raise RuntimeError("a mistake in a plan")
RECIPES = [dataclasses.replace(honest, name="mine.raises", plan=plan)]
"""

RAISES_ONCE = """
import dataclasses, itertools, multiprocessing
from narrowfuzz.recipe.recipe import load_recipes
honest, calls = load_recipes()["torch.fp32"], itertools.count()
def plan(spec):
    # the first hundred are asked before a case is drawn
    if multiprocessing.parent_process() is not None and next(calls) == 150:
        raise RuntimeError("a mistake in a plan")
    return honest.plan(spec)
RECIPES = [dataclasses.replace(honest, name="mine.raises", plan=plan)]
"""


@pytest.mark.heavy
@pytest.mark.slow
def test_an_aborted_worker_costs_one_worker_and_names_its_case(
    tmp_path: Path, scripts: RunScript
) -> None:
    # with the ledger: the libraries' own refusals must not be taken for the abort
    args = ("--minutes", "2", "--recipe", FLOAT8, "--recipe", "torch.fp32", *EAGER)
    run = campaign(tmp_path / "out", *args, "--plant", "kernel-aborts", stop_after=1)
    assert run.code == 1, run.output
    finding = run.finding("contract")
    assert finding.severity == "medium" and "SIGABRT" in finding.sentence
    spec = finding.minimal.spec
    widest = spec.n if spec.model == "linear" else max(spec.n, spec.k)  # an MLP has two
    assert spec.recipe == FLOAT8 and widest >= 64
    assert run.summary["lost_workers"] >= 1
    assert run.summary["cases"] > 0
    assert "raised" not in run.output
    script = run.folder / "findings" / finding.id / "repro.py"
    assert scripts(script, plant=("", "kernel-aborts")).crashed
    assert scripts(script).code == 0


@pytest.mark.heavy
def test_a_lost_device_costs_one_worker_and_names_its_case(tmp_path: Path) -> None:
    args = ("--minutes", "0.15", "--recipe", FLOAT8, "--recipe", "torch.fp32", *EAGER)
    run = campaign(tmp_path / "out", *args, "--plant", "device-lost")
    assert run.code == 1, run.output
    finding = run.finding("contract")
    assert "loses the device" in finding.sentence
    assert run.summary["lost_workers"] >= 1
    assert "worker 0 has lost its device: CUDA error: device-side assert" in run.output
    assert "raised" not in run.output
    script = run.folder / "findings" / finding.id / "repro.py"
    assert "torch.cuda.synchronize()" in script.read_text(), "what a GPU does is known later"
    assert run_script(script, plant=("", "device-lost")).crashed
    assert run_script(script).code == 0


def test_a_lost_case_whose_turn_comes_too_late_stays_suspected(tmp_path: Path) -> None:
    case = Case(spec=Spec(recipe=FLOAT8), data=DataSpec())
    late, tally = supervisor(Config(out=tmp_path, recipes=(FLOAT8,)))
    kept = tmp_path / "journal" / "lost.json"
    kept.touch()
    late.deadline = 0.0
    late.record_loss(kept, case, "ends the process with SIGABRT")
    assert not late.store.findings() and not tally.found
    (suspected,) = late.store.suspected()
    assert suspected.case == case and "the run ended before" in suspected.why_suspected
    assert not kept.exists()


@pytest.mark.heavy
def test_ctrl_c_names_the_lost_cases_that_were_not_looked_into(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(out, "--minutes", "5", "--recipe", FLOAT8, "--plant", "kernel-aborts", *EAGER)
    wait_for(lambda: list(out.glob("journal/lost-*.json")), process)
    os.killpg(process.pid, signal.SIGINT)
    run = finish(process, out)
    assert run.code == 130, run.output
    (lost, *_) = out.glob("journal/lost-*.json")
    assert f"not looked into: journal/{lost.name}" in " ".join(run.output.split())
    load_case(lost.read_bytes())


@pytest.mark.heavy
@pytest.mark.slow
def test_an_exception_of_ours_ends_the_run_with_3_and_a_note(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RAISES)
    args = ("--minutes", "5", "--recipe", "mine.raises", "--recipe-file", "mine.py")
    run = campaign(tmp_path / "out", *args, *EAGER, timeout=120)
    assert run.code == 3, run.output
    assert "a mistake in a plan" in run.output and "note worker 0 raised" in run.output
    assert run.summary["notes"] == ["worker 0 raised; its error is above"]


@pytest.mark.heavy
def test_what_raises_only_once_is_said_without_what_was_drawn(tmp_path: Path) -> None:
    """Hypothesis, which does not see it again, lists every case that it tried."""
    (tmp_path / "mine.py").write_text(RAISES_ONCE)
    args = ("--cases", "60", "--recipe", "mine.raises", "--recipe-file", "mine.py")
    run = campaign(tmp_path / "out", *args, *EAGER, timeout=120)
    assert run.code == 3, run.output
    before, said = run.output.split("Traceback (innermost 12 calls):")
    assert "Error" not in before and "Case(" not in run.output
    assert said.index("RuntimeError: a mistake in a plan") < said.index(
        "worker 0 raised an exception; last case begun: "
    )
    assert "(mine.raises, " in said and len(run.output.splitlines()) < 80


def test_the_innermost_error_is_said_without_its_notes() -> None:
    inner = ValueError("inside" + "x" * 9000)
    inner.add_note("all that was drawn")
    outer = ExceptionGroup("flaky", [ExceptionGroup("again", [inner]), KeyError("other")])
    said = innermost(outer)
    assert "ValueError: inside" in said and len(said) < 2500
    assert "drawn" not in said and "flaky" not in said and "other" not in said


class TestInterrupt:
    @pytest.mark.slow
    def test_ctrl_c_keeps_everything_found_and_leaves_no_process(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        args = ("--minutes", "5", "--recipe", FLOAT8, "--no-ledger", "--plant", "gemm-gain")
        process = start(out, *args, *EAGER)
        found = '"fingerprint": "O5--'  # known issues are found as well
        wait_for(
            lambda: any(found in f.read_text() for f in out.glob("findings/*/*.json")), process
        )
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the whole group
        process.wait(120)
        soon = time.monotonic() + 10.0
        while group(process.pid):
            assert time.monotonic() < soon, "processes are left"
            time.sleep(0.05)
        run = finish(process, out)
        assert run.code == 130, run.output
        assert run.summary["interrupted"] and run.summary["cases"] > 0
        assert run.finding("O5").flake == "always"
        assert "Traceback" not in run.output

    @pytest.mark.heavy
    def test_ctrl_c_while_workers_start_is_an_interrupt_too(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        process = start(out, "--minutes", "5", "--recipe", "torch.fp32", *EAGER)
        wait_for((out / "findings.db").exists, process)
        time.sleep(1.0)  # the fork server is importing torch
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
        assert not group(process.pid)
        run = finish(process, out)
        assert run.code == 130, run.output
        assert run.summary["interrupted"]
        assert "Traceback" not in run.output


def test_an_interruption_while_findings_are_explained_leaves_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kw: Any) -> None:
        raise KeyboardInterrupt

    finding = SimpleNamespace(id="abc", sentence="it is wrong", known_issue=None)
    run: Any = SimpleNamespace(
        accepted=SimpleNamespace(counting=lambda found: found),
        store=SimpleNamespace(findings=lambda: [finding, finding], out=tmp_path),
        run_options=RunOptions(),
        options=lambda: [],
    )
    monkeypatch.setattr("narrowfuzz.campaign.campaign.subprocess.run", interrupted)
    notes = list(Campaign.explain(run, Console(quiet=True)))
    assert notes == ["interrupted: abc and what comes after it is not explained"]
