"""The command line: its help, what options become, what its lists and the doctor print."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import ends, python
from narrowfuzz.case.ladder import LADDER
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case
from narrowfuzz.report.tally import Tally

CLEAN = Case(spec=Spec(recipe="torch.fp32", dtype="fp32"), data=DataSpec())
#: torchao's wrapper tensor ignores the bias: a real divergence of 0.18.
NO_BIAS = Case(
    spec=Spec(recipe="torchao.mxfp8.rceil", backend="wrapper", bias=True), data=DataSpec()
)
KINDS = ("recipes", "models", "arms", "rules", "faults", "known")
Result = tuple[int, str, str]
#: Runs a command line, and one that is refused in a sentence.
Run, Refused = Callable[..., Result], Callable[..., str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands run in an empty folder and get their environment back as it was."""
    before = dict(os.environ)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def nf(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def run(*argv: object) -> Result:
        capfd.readouterr()
        return (ends(*map(str, argv)), *capfd.readouterr())

    return run


@pytest.fixture
def refused(nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The one sentence a bad command line gets; no output, no file, no campaign."""

    def started(*args: Any) -> None:
        raise AssertionError("a campaign was started")

    monkeypatch.setattr("narrowfuzz.campaign.supervisor.run_campaign", started)

    def run(*argv: object) -> str:
        before = sorted(here.rglob("*"))
        code, out, err = nf(*argv)
        assert code == 2, (code, out, err)
        assert out == ""
        assert err.startswith("narrowfuzz: ") and err.count("\n") == 1 and err.endswith("\n"), err
        assert sorted(here.rglob("*")) == before
        sentence = err.removeprefix("narrowfuzz: ").strip()
        assert sentence
        return sentence

    return run


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "argv", [["--help"], ["run", "--help"], ["replay", "--help"]], ids=" ".join
)
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    code = f"""
import sys
from narrowfuzz.cli import main
try:
    main({argv!r})
except SystemExit as stopped:
    assert stopped.code == 0, stopped.code
heavy = {{"torch", "torchao", "numpy", "hypothesis", "pytest", "sqlite3"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = python("-c", code)
    assert "Usage" in done.stdout and not done.stderr


def test_the_bare_command_shows_its_help_and_no_empty_sentence(nf: Run) -> None:
    _, out, err = nf()
    assert "Usage" in out + err
    assert "narrowfuzz: \n" not in err


def test_zero_workers_means_one_per_core(
    nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    configs = campaigns(monkeypatch)
    assert nf("run", "--workers", "0", "--out", "new")[0] == 0
    assert configs[0].workers == os.cpu_count()
    assert 0 <= configs[0].seed < 2**32


def test_options_reach_the_campaign(nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    configs = campaigns(monkeypatch)
    argv = ["run", "--seed", 4294967295, "--minutes", 0.5, "--workers", 64, "--out", "new"]
    assert nf(*argv, "--recipe", "torch.*", "--arm", "eager*", "--plant", "gemm-gain")[0] == 0
    (config,) = configs
    assert (config.seed, config.minutes, config.workers) == (2**32 - 1, 0.5, 64)
    assert set(config.recipes) == {"torch.fp32", "torch.bf16", "torch.fp16", "torch.scaled_mm"}
    assert (config.arms, config.plant, config.out) == (("eager*",), ("", "gemm-gain"), Path("new"))


def test_each_resumed_run_draws_something_new(
    nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    configs = campaigns(monkeypatch, journal=True)
    for resume in ([], ["--resume"], ["--resume"]):
        assert nf("run", "--seed", 1, "--workers", 1, "--out", "new", *resume)[0] == 0
    assert len({config.part for config in configs}) == 3


def campaigns(monkeypatch: pytest.MonkeyPatch, *, journal: bool = False) -> list[Any]:
    """Replace the supervisor by one that runs nothing; returns the configs it is given."""
    from narrowfuzz.campaign import supervisor

    configs: list[Any] = []

    def run_campaign(config: Any, store: Any, progress: Any) -> Tally:
        configs.append(config)
        if journal:
            (store.out / "journal" / "0.json").write_bytes(dump_case(CLEAN))
        return Tally()

    monkeypatch.setattr(supervisor, "run_campaign", run_campaign)
    return configs


@pytest.mark.heavy
def test_a_quiet_run_says_the_verdict_and_nothing_around_it(
    nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    campaigns(monkeypatch)
    code, out, _ = nf("run", "-q", "--out", "new", "--recipe", "torch.fp32", "--arm", "eager")
    assert code == 0
    said = [line for line in out.splitlines() if line]
    assert len(said) == 2 and said[0].startswith("New findings: 0") and "Judged: 0 of" in said[1]
    usual = nf("run", "--out", "other", "--recipe", "torch.fp32", "--arm", "eager")[1]
    assert "recipes: torch.fp32" in usual and "Output: other" in usual
    assert "how it adds" not in usual
    more = nf("run", "-v", "--out", "third", "--recipe", "torch.fp32", "--arm", "eager")[1]
    assert "how it adds" in more


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_list_prints_every_kind(nf: Run, here: Path, kind: str) -> None:
    code, out, err = nf("list", kind)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) >= 2
    assert not list(here.iterdir())


def test_list_names_a_users_own_recipes(nf: Run, here: Path) -> None:
    (here / "mine.py").write_text(OWN)
    code, out, _ = nf("list", "recipes", "--recipe-file", "mine.py")
    assert code == 0
    assert "mine.fp32" in out and "torch.fp32" in out


OWN = """
import dataclasses
from narrowfuzz.recipe.recipe import load_recipes
RECIPES = [dataclasses.replace(load_recipes()["torch.fp32"], name="mine.fp32")]
"""


def test_doctor_prints_versions_policies_and_arms(nf: Run) -> None:
    code, out, _ = nf("doctor")
    assert code == 0
    for word in ("torch", "torchao", "e4m3fn finite overflow", "fp32 subnormals", "g++"):
        assert word in out
    assert all(arm.name in out for arm in LADDER)
    line = next(line for line in out.splitlines() if line.startswith("transformer_engine"))
    assert ("te.*" in line) == ("absent" in line)
