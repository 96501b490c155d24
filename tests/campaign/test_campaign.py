"""Campaigns from outside: what a run judges, finds and explains, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.campaign.config import Config
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.cli import main
from narrowfuzz.report.store import load_finding
from narrowfuzz.report.summary import rule_counts
from narrowfuzz.triage.finding import Finding, finding_id
from narrowfuzz.triage.verify import RunScript
from scripts_of_findings import assert_shows, standing_alone

pytestmark = pytest.mark.xdist_group("campaign")
FLOAT8 = "torchao.float8.rowwise"
EAGER = ("--arm", "eager", "--workers", "1", "--seed", "1")
#: A lost worker's case is minimised in processes of their own; here not for long. What ends a hunt
#: may end a campaign, too.
COMMAND = """
import functools, json, sys
import narrowfuzz.campaign.main
from narrowfuzz.cli import main
if {"kernel-aborts", "device-lost"} & {*sys.argv}:
    import narrowfuzz.triage.loss
    narrowfuzz.triage.loss._SECONDS = 2.0
ends = json.loads(sys.argv[1])
narrowfuzz.campaign.main.Config = functools.partial(narrowfuzz.campaign.main.Config, **ends)
main(sys.argv[2:])
"""


@dataclass
class Run:
    """A finished campaign."""

    folder: Path
    code: int
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded

    def rows(self) -> list[tuple[str, ...]]:
        with closing(sqlite3.connect(self.folder / "findings.db")) as db:
            return db.execute(
                "select id, oracle, severity, status, sentence from findings"
            ).fetchall()

    def finding(self, rule: str) -> Finding:
        found = [row[0] for row in self.rows() if row[1] == rule and row[3] == "new"]
        assert len(found) == 1, self.output
        return load_finding(self.folder / "findings" / found[0])


def start(out: Path, *args: str, **ends: int) -> subprocess.Popen[str]:
    """A campaign in a process group of its own, which the time or a count ``ends``."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, json.dumps(ends), "run", "--out", str(out), *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        cwd=out.parent, env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip


def finish(process: subprocess.Popen[str], out: Path, timeout: float = 240.0) -> Run:
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        left = group(process.pid)
        if process.poll() is None or left:
            os.killpg(process.pid, signal.SIGKILL)
    return Run(out, process.returncode, output)


def group(pgid: int) -> list[int]:
    """Living processes of a group, after it had a moment to end."""
    alive: list[int] = []
    for _ in range(50):
        alive = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == pgid and fields[0] != "Z":
                alive.append(int(stat.parent.name))
        if not alive:
            break
        time.sleep(0.1)
    return alive


def campaign(out: Path, *args: str, timeout: float = 240.0, **ends: int) -> Run:
    return finish(start(out, *args, **ends), out, timeout)


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.heavy
@pytest.mark.slow
def test_on_ranks_each_layout_has_one_case(tmp_path: Path) -> None:
    run = campaign(tmp_path / "out", "--cases", "12", "--recipe", "torch.fp32", "--arm", "sharded")
    assert run.code == 0, run.output
    assert run.summary["cases"] == run.summary["specs"] == 12


@pytest.mark.slow
def test_a_clean_campaign_ends_with_0_and_says_what_it_judged(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    out.parent.mkdir()
    run = campaign(out, "--cases", "40", "--recipe", "torch.fp32", *EAGER)
    assert run.code == 0, run.output
    assert run.summary["cases"] == 40 and run.summary["specs"] > 0
    assert run.summary["cases_digest"] in run.output
    assert run.summary["seed"] == 1 and not run.summary["interrupted"]
    assert run.summary["rules"]["O6"]["torch.fp32"][0] > 0
    assert run.rows() == []
    environment = json.loads((out / "env.json").read_text())
    assert environment["versions"]["torch"] != "absent" and environment["policies"]
    assert "New findings: 0" in run.output and "Traceback" not in run.output


@pytest.mark.heavy
def test_a_campaign_that_goes_on_has_no_digest(tmp_path: Path) -> None:
    args = ("--recipe", "torch.fp32", *EAGER)
    campaign(tmp_path / "out", "--cases", "4", *args)
    again = campaign(tmp_path / "out", "--minutes", "0.05", *args, "--resume")
    assert again.code == 0, again.output
    assert "digest of the cases" not in again.output


@pytest.fixture(scope="module")
def gained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A campaign under a planted gain of 3 %."""
    out = tmp_path_factory.mktemp("campaign") / "out"
    args = ("--minutes", "1", "--recipe", FLOAT8, "--no-ledger", "--plant", "gemm-gain")
    return campaign(out, *args, *EAGER, stop_after=1)


@pytest.mark.slow
def test_a_planted_fault_is_found_and_named(gained: Run) -> None:
    assert gained.code == 1, gained.output
    finding = gained.finding("O5")
    assert (finding.arm, finding.role, finding.recipe) == ("eager", "output", FLOAT8)
    assert (finding.severity, finding.flake, finding.strength) == ("high", "always", "bound")
    assert finding.sentence in gained.output and finding.id in gained.output
    assert finding.known_issue == "", "asked, though without a ledger, and no entry explains it"


@pytest.mark.slow
def test_its_minimal_case_has_nothing_the_fault_does_not_need(gained: Run) -> None:
    finding = gained.finding("O5")
    spec, data = finding.minimal.spec, finding.minimal.data
    assert max(spec.m, spec.k, spec.n) <= 32
    simplest = Spec(recipe=FLOAT8, backend=spec.backend, m=spec.m, k=spec.k, n=spec.n)
    assert spec == simplest
    assert data == DataSpec(seed=data.seed)
    assert not finding.untried
    folder = gained.folder / "findings" / finding.id
    assert load_case((folder / "case.json").read_bytes()) == finding.minimal
    assert finding.id == finding_id(finding.fingerprint, finding.minimal)


def test_two_causes_with_one_smallest_case_are_two_findings() -> None:
    case = Case(spec=Spec(recipe=FLOAT8), data=DataSpec())
    assert finding_id("O5--output", case) != finding_id("contract--backward", case)


@pytest.mark.slow
def test_its_script_shows_the_fault_and_only_the_fault(gained: Run, scripts: RunScript) -> None:
    script = gained.folder / "findings" / gained.finding("O5").id / "repro.py"
    text = script.read_text()
    standing_alone(text)
    literals = [line for line in text.splitlines() if line.strip(' ",').isalnum()]
    assert len(text.splitlines()) - len(literals) <= 60
    assert_shows(scripts, script, ("", "gemm-gain"))


@pytest.mark.slow
def test_without_the_fault_its_finding_replays_as_fixed(
    gained: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gained.folder)
    with pytest.raises(SystemExit, match="0"):
        main(["replay", str(gained.folder / "findings" / gained.finding("O5").id)])
    assert "fixed" in capsys.readouterr().out


def test_a_rule_that_judged_nothing_shows_as_such() -> None:
    counts: Any = {
        "cases": 3,
        ("known", "an-entry"): 2,
        ("rule", "O5", "r", "ok"): 4,
        ("rule", "O5", "r", "known"): 1,
        ("rule", "O5", "r", "inconclusive"): 2,
        ("rule", "O5", "r", "not_applicable"): 7,
        ("rule", "O5", "s", "unsupported"): 1,
    }
    assert rule_counts(counts) == {"O5": {"r": [5, 2, 7], "s": [0, 0, 1]}}


@pytest.mark.parametrize(
    "change", [{"minutes": 0.0}, {"minutes": float("nan")}, {"workers": 0}, {"seed": -1}]
)
def test_a_config_is_valid_or_not_made(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        Config(out=Path("out"), **change)


@pytest.mark.heavy
def test_new_findings_are_explained_if_asked(tmp_path: Path) -> None:
    recipe = ("--recipe", "torchao.mxfp8.rceil", *EAGER)
    planted = ("--plant", "mx-scale-byte-plus-one", "--cases", "20", "--seed", "3", "--explain")
    run = campaign(tmp_path / "out", *recipe, *planted)
    assert run.code == 1 and "not explained" not in run.output, run.output
    found = [f for f in run.summary["findings"] if "--operand--" in f["fingerprint"]]
    (first, *_) = found
    folder = run.folder / "findings" / first["id"]
    assert (folder / "causes.json").is_file()
    assert "of 20 random seeds" in run.output and "narrowfuzz explain" not in run.output
    assert "What it needs, and what makes it go away" in (run.folder / "report.html").read_text()
