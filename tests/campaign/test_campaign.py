"""Campaigns from outside: what a run leaves behind, whatever happens to its workers."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fresh import python
from narrowfuzz.campaign.campaign import Campaign
from narrowfuzz.campaign.compiling import Compiles
from narrowfuzz.campaign.config import Config, Place
from narrowfuzz.campaign.journal import Journal, Writing
from narrowfuzz.campaign.live import Live, progress
from narrowfuzz.campaign.messages import (
    Claimed,
    Compiled,
    Compiling,
    Counts,
    Finished,
    Message,
    ScriptConfirmed,
    Settled,
)
from narrowfuzz.campaign.raised import innermost
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.campaign.slices import FIRST
from narrowfuzz.campaign.supervisor import Supervisor
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.cli import main
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.judge.programs import Programs
from narrowfuzz.machine.device import Device
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.report.store import Store, claim, load_finding, release
from narrowfuzz.report.summary import rule_counts
from narrowfuzz.report.tally import Tally
from narrowfuzz.triage.finding import Finding, Triaged, finding_id
from narrowfuzz.triage.verify import RunScript, run_script
from rich.console import Console
from scripts_of_findings import assert_shows, standing_alone

pytestmark = pytest.mark.xdist_group("campaign")
FLOAT8 = "torchao.float8.rowwise"
EAGER = ("--arm", "eager", "--workers", "1", "--seed", "1")
#: A lost worker's case is minimised in processes of their own; here not for long. What ends a hunt
#: may end a campaign, too.
COMMAND = """
import functools, json, sys
import narrowfuzz.campaign.main
import narrowfuzz.triage.loss
from narrowfuzz.cli import main
narrowfuzz.triage.loss._SECONDS = 2.0
ends = json.loads(sys.argv[1])
narrowfuzz.campaign.main.Config = functools.partial(narrowfuzz.campaign.main.Config, **ends)
main(sys.argv[2:])
"""
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
    if multiprocessing.parent_process() is not None and next(calls) == 40:
        raise RuntimeError("a mistake in a plan")
    return honest.plan(spec)
RECIPES = [dataclasses.replace(honest, name="mine.raises", plan=plan)]
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


@pytest.mark.slow
def test_on_ranks_each_layout_has_one_case(tmp_path: Path) -> None:
    run = campaign(tmp_path / "out", "--cases", "24", "--recipe", "torch.fp32", "--arm", "sharded")
    assert run.code == 0, run.output
    assert run.summary["cases"] == run.summary["specs"] == 24


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
    assert run.summary["notes"] == ["worker 0 raised; its traceback is above"]


def test_what_torch_compiles_is_told_as_it_begins_and_as_it_ends() -> None:
    sent: list[Message] = []
    compiles = Compiles(sent.append, lambda: "mine mlp_gelu")
    programs = Programs(load_recipes(), "cpu")
    programs.listen = compiles.listen
    for features in (16, 32):  # the second forgets what was compiled first, and who listened
        spec = Spec(recipe="torch.fp32", dtype="fp32", k=features, compile="aot_eager")
        case = Case(spec=spec, data=DataSpec())
        program = programs.of(spec, BY_NAME["aot_eager"])
        tensors = tensors_of(case, load_recipes()["torch.fp32"])
        for first in (True, False):
            sent.clear()
            programs.tapped(program, tensors, spec, None)
            kinds = [type(one) for one in sent]
            assert kinds == [Compiling, Compiled] * (len(kinds) // 2)
            assert bool(kinds) is first
            begun = [one.what for one in sent if isinstance(one, Compiling)]
            assert {*begun} == ({"mine mlp_gelu"} if first else set())
    torch._dynamo.reset()


def test_what_is_compiled_of_another_spec_is_forgotten_though_its_program_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo caches by code object: of many Specs it would give up compiling."""
    forgotten: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: forgotten.append(1))
    programs = Programs(load_recipes(), "cpu")
    specs = [
        Spec(recipe="torch.fp32", dtype="fp32", k=k, compile="aot_eager") for k in (16, 16, 32, 48)
    ]
    for spec, times in zip(specs, (0, 0, 1, 2), strict=True):
        programs.of(spec, BY_NAME["aot_eager"])
        assert len(forgotten) == times
        programs.clear()


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


def supervisor(config: Config) -> tuple[Supervisor, Tally]:
    """One that has started no process, and what it counts."""
    tally = Tally()
    return Supervisor(config, Store(config.out), tally), tally


def test_what_compiles_is_said_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    config = Config(out=tmp_path)
    workers, tally = supervisor(config)
    first, second = workers.handles
    now = time.monotonic()
    workers.take(Compiling("mine llama_block", now - 2), first)
    assert progress(tally, config).endswith("compiling: mine llama_block, 2 s")
    workers.take(Compiling("mine [own].py:build", now - 23), second)
    assert progress(tally, config).endswith("compiling: mine [own].py:build, 23 s and 1 more")
    workers.take(Compiled(), second)
    assert progress(tally, config).endswith("compiling: mine llama_block, 2 s")
    workers.take(Compiled(), first)
    assert "compiling" not in progress(tally, config)


def test_a_case_that_takes_long_is_said_with_its_arm_and_its_seconds(tmp_path: Path) -> None:
    case, journal = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec()), Journal.of(tmp_path, 0)
    journal.file.parent.mkdir()
    writing = Writing(journal)
    assert journal.running() is None and str(journal) == "no case begun"
    writing.begin(case)
    writing.note_arm("eager+checkpoint")
    assert journal.running() is None and case.id in str(journal)
    os.utime(journal.file, (time.time() - 34, time.time() - 34))
    long = journal.running()
    assert long is not None
    tally, config = Tally(ready=1.0, running={0: long}), Config(out=tmp_path)
    tally.started -= 40
    tally.counts["cases"] = 3
    assert "/s)" not in progress(tally, config)
    words = BY_NAME["eager+checkpoint"].words
    assert progress(tally, config).endswith(f"running: torch.fp32 linear, {words}, 34 s")
    tally.compiling[0] = ("mine llama_block", time.monotonic())
    assert "running" not in progress(tally, config)


def test_what_a_journal_says_is_whole_whatever_was_written_before(tmp_path: Path) -> None:
    journal = Journal.of(tmp_path, 3)
    journal.file.parent.mkdir()
    long = Case(spec=Spec(recipe="torch.fp32", model="llama_block", m=97), data=DataSpec(seed=9))
    short = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
    writing = Writing(journal)
    assert journal.case is None and not journal.silent
    for case in (long, short, long):
        writing.begin(case)
        assert journal.case == case
    Writing(journal).begin(short)  # the next process of its place
    assert journal.case == short
    assert json.loads(journal.file.read_bytes())["spec"]["recipe"] == "torch.fp32"
    lost = journal.lose(short)
    assert journal.case is None and load_case(lost.read_bytes()) == short


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


def drawn(seed: int = 1, part: int = 0, number: int = 0, generation: int = 0) -> list[str]:
    """Ids of the cases of a worker's first two eager slices."""
    from narrowfuzz.campaign.worker import Worker

    folder = Path("out")
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    models = ("torch.*", "torchao.*")  # what schedules run on takes turns with these
    config = Config(out=folder, seed=seed, part=part, recipes=models, arms=("eager",), draws=2)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    with receiving, sending:
        place = Place(number, generation, 0, time.monotonic() + 600)
        worker = Worker(config, place, sending, Device())
        cases: list[Case] = []

        def record(case: Case, oracles: Any, only: Any = None, **kw: Any) -> Any:
            cases.append(case)
            return SimpleNamespace(ran=True)

        worker._judge = record  # type: ignore[method-assign]
        for now in FIRST[:2]:
            worker.serve(now, time.monotonic() + 600)
    return [case.id for case in cases]


@cache
def first_draws() -> tuple[str, ...]:
    return tuple(drawn())


def fresh_draws(hash_seed: str) -> list[str]:
    """``drawn`` of a new interpreter."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_campaign as c; print(*c.drawn())"
    ids = python("-c", code, env={"PYTHONHASHSEED": hash_seed}).stdout.split()
    assert len(ids) > 50
    return ids


class TestDraws:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_a_seed_draws_the_same_cases_again(self) -> None:
        again = drawn()
        assert list(first_draws()) == again
        assert len(again) > 50

    @pytest.mark.heavy
    def test_a_seed_draws_the_same_cases_in_another_process(self) -> None:
        """Whatever modules lie outside site-packages: here are those of the tests."""
        assert fresh_draws(hash_seed="1") == fresh_draws(hash_seed="2") == list(first_draws())

    @pytest.mark.parametrize("change", [{"seed": 2}, {"part": 1}, {"number": 1}, {"generation": 1}])
    def test_seed_part_worker_and_replacement_draw_others(self, change: dict[str, int]) -> None:
        shared = set(first_draws()) & set(drawn(**change))
        assert len(shared) <= 5


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "out")


class TestStore:
    def test_findings_come_back_most_severe_first(self, store: Store) -> None:
        for severity in ("low", "high", "medium"):
            store.add(finding(severity, seed=len(severity)), "print()")
        store.add(suspected(seed=99), "print()")
        assert [f.severity for f in store.findings()] == ["high", "medium", "low"]
        assert len(store.findings("suspected")) == 1

    def test_a_finding_comes_back_whole(self, store: Store) -> None:
        kept = finding("high")
        assert store.add(kept, "print('x')") == "new"
        assert store.findings() == [kept]
        folder = store.out / "findings" / kept.id
        assert load_case((folder / "case.json").read_bytes()) == kept.minimal
        assert (folder / "repro.py").read_text() == "print('x')"
        assert Store(store.out).findings() == [kept]

    def test_a_fingerprint_is_claimed_once(self, store: Store) -> None:
        assert claim(store.out, "O5--output--eager--a/b c--torch")
        assert not claim(store.out, "O5--output--eager--a/b c--torch")
        assert claim(store.out, "O6--output--eager--a/b c--torch")

    def test_what_one_case_does_not_show_another_may_three_in_all(self, store: Store) -> None:
        name = "O5--output--eager--value--torch"
        for _ in range(3):
            assert claim(store.out, name)
            release(store.out, name)
        assert not claim(store.out, name)

    def test_three_of_a_dtype_close_it_for_that_and_six_for_all(self, store: Store) -> None:
        name = "O5--output--eager--value--torch"
        for dtype in ("bf16", "fp32"):
            for _ in range(3):
                assert claim(store.out, name, dtype) and not claim(store.out, name, "fp16")
                release(store.out, name, dtype)
            assert not claim(store.out, name, dtype)
        assert not claim(store.out, name, "fp16")

    def test_what_no_script_shows_is_kept_as_suspected_with_the_reason(self, store: Store) -> None:
        kept = suspected()
        assert store.add(kept, "") == "suspected"
        assert store.findings() == [] and store.suspected() == [kept]
        folder = store.out / "findings" / kept.id
        assert load_case((folder / "case.json").read_bytes()) == kept.minimal

    def test_what_one_case_did_not_show_becomes_a_sighting_of_one_that_does(
        self, store: Store
    ) -> None:
        first = suspected()
        second = finding(seed=1, fingerprint=first.fingerprint)
        store.add(first, "")
        assert store.add(second, "") == "new"
        assert store.suspected() == [] and store.findings() == [second]
        assert store.sightings(second.id) == [first]

    def test_findings_whose_minimal_cases_need_the_same_are_one(self, store: Store) -> None:
        first, second = (finding(seed=i, needs=["switch"]) for i in range(2))
        other = finding(seed=2, needs=["reload"])
        assert [store.add(f, "") for f in (first, second, other)] == ["new", "sighting", "new"]
        assert store.sightings(first.id) == [second] and store.sightings(other.id) == []

    def test_what_needs_more_to_break_the_same_rule_is_the_same(self, store: Store) -> None:
        more = finding("high", 0, needs=["reentrant", "switch"], rule="O14")
        least = finding("medium", 1, needs=["reentrant"], rule="O14")
        other = finding("low", 2, needs=["reentrant", "reload"], rule="O13")
        assert [store.add(f, "") for f in (more, least, other)] == ["new", "new", "new"]
        kept = store.findings()
        assert [f.id for f in kept] == [least.id, other.id]
        assert kept[0].severity == "high"  # as its severest sighting
        assert [f.id for f in store.sightings(least.id)] == [more.id]

    def test_another_known_issue_is_another_cause_and_keeps_its_severity(
        self, store: Store
    ) -> None:
        known, worse, new, unasked = (
            finding(how, i, needs=["switch"], known_issue=issue)
            for i, (how, issue) in enumerate(
                [("low", "one"), ("medium", "two"), ("medium", ""), ("high", None)]
            )
        )
        assert [store.add(f, "") for f in (known, worse, new)] == ["new", "new", "new"]
        assert store.add(unasked, "") == "sighting"
        how = {f.id: f.severity for f in store.findings()}
        assert how[known.id] == "low" and how[worse.id] == "medium"
        again = finding("high", 9, needs=["switch"], known_issue="")
        assert store.add(again, "") == "sighting"
        assert {f.id: f.severity for f in store.findings()}[known.id] == "low"

    def test_what_needs_nothing_is_never_taken_for_the_same(self, store: Store) -> None:
        assert [store.add(finding(seed=i), "") for i in range(2)] == ["new", "new"]

    def test_a_smaller_case_takes_the_place_of_a_larger(self, store: Store) -> None:
        missed = suspected(seed=0, fingerprint="one")
        large, small = (finding(seed=i, fingerprint="one") for i in (1, 2))
        store.add(missed, "")
        store.add(large, "large")
        assert store.replace(large.id, small, "small") == "new"
        assert store.findings() == [small]
        assert [f.id for f in store.sightings(small.id)] == [missed.id]
        assert not (store.out / "findings" / large.id).exists()

    def test_what_stays_as_it_is_stays(self, store: Store) -> None:
        kept = finding("high")
        store.add(kept, "a script")
        assert store.replace(kept.id, kept, "a script") == "new"
        assert store.findings() == [kept]

    def test_a_smaller_case_may_need_what_another_needs(self, store: Store) -> None:
        first, large, small = (
            finding(seed=i, needs=needs) for i, needs in enumerate([["switch"], [], ["switch"]])
        )
        assert [store.add(f, "") for f in (first, large)] == ["new", "new"]
        assert store.replace(large.id, small, "") == "sighting"
        assert store.findings() == [first]
        assert store.sightings(first.id) == [small]

    @pytest.mark.parametrize("tail", ["x", "y" * 300, "(RuntimeError in <lambda>)", "ü:*?"])
    def test_any_fingerprint_can_be_claimed(self, store: Store, tail: str) -> None:
        assert claim(store.out, f"contract--forward--eager--{tail}")
        assert not claim(store.out, f"contract--forward--eager--{tail}")

    def test_long_fingerprints_are_told_apart(self, store: Store) -> None:
        assert claim(store.out, "x" * 250 + "1")
        assert claim(store.out, "x" * 250 + "2")


class TestFoundAsSoonAsShown:
    def test_it_counts_from_then_with_its_smallest_case(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        large, small = finding("high", seed=1), finding("high", seed=2)
        workers.take(Counts({"cases": 3}), handle)
        workers.take(ScriptConfirmed(Triaged(large, "")), handle)
        (shown,) = tally.found
        assert shown.finding == large and handle.shown == large.id
        workers.take(Counts({"cases": 4}), handle)
        workers.take(Finished(Triaged(small, "")), handle)
        assert tally.found == [dataclasses.replace(shown, finding=small)] and shown.cases == 3
        assert not handle.shown

    def test_a_sighting_of_another_does_not_count(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        first, large, small = (
            finding(seed=i, needs=needs) for i, needs in enumerate([["switch"], [], ["switch"]])
        )
        workers.take(Finished(Triaged(first, "")), handle)
        workers.take(ScriptConfirmed(Triaged(large, "")), handle)
        assert tally.new == 2
        workers.take(Finished(Triaged(small, "")), handle)
        assert [found.finding for found in tally.found] == [first]

    def test_what_was_not_confirmed_when_a_run_ends_is_suspected(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        for i, name in enumerate(("lost", "dropped")):
            workers.take(Claimed(Triaged(suspected(seed=i, fingerprint=name), "")), handle)
        workers.take(Settled("dropped"), handle)
        assert not workers.store.suspected()
        workers.keep_claimed()
        assert [one.fingerprint for one in workers.store.suspected()] == [
            "lost"
        ] and not tally.found

    def test_what_no_script_shows_is_suspected(self, tmp_path: Path) -> None:
        workers, tally = supervisor(Config(out=tmp_path, workers=1))
        (handle,) = workers.handles
        workers.take(Finished(Triaged(suspected(), "")), handle)
        assert not tally.found and len(workers.store.suspected()) == 1


def finding(severity: str = "high", seed: int = 0, **changes: object) -> Finding:
    case = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec(seed=seed))
    words = dict.fromkeys(("recipe", "rule", "arm", "role", "symptom", "sentence"), "x")
    fields = {
        "id": case.id, "fingerprint": f"f{seed}", "severity": severity, "strength": "exact",
        "reach": "gaussian", "case": case, "minimal": case, "flake": "always",
    }  # fmt: skip
    return msgspec.structs.replace(Finding(**words, **fields), **changes)  # type: ignore[arg-type]


def test_a_finding_is_named_once_and_as_first_found_while_nothing_smaller_is(
    tmp_path: Path,
) -> None:
    console = Console(file=io.StringIO(), width=40, soft_wrap=True)
    config = Config(out=tmp_path, workers=1)
    live, (workers, tally) = Live(console, config), supervisor(config)
    tally.ready, (handle,) = 1.0, workers.handles
    drawn, other = finding(arm="eager"), finding(seed=1, arm="eager")
    smaller = msgspec.structs.replace(other, minimal=drawn.case)
    for one in (drawn, smaller, msgspec.structs.replace(drawn, minimal=other.case)):
        workers.take(Finished(Triaged(one, "")), handle)
        live.show(tally)
    assert isinstance(console.file, io.StringIO)
    said = [line for line in console.file.getvalue().splitlines() if line.startswith("found:")]
    assert ["as first found" in line for line in said] == [True, False]


def suspected(**changes: object) -> Finding:
    """One that no script shows."""
    return finding(why_suspected="its script passes", **changes)  # type: ignore[arg-type]


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
