"""``narrowfuzz check`` and ``run --model`` as a user types them, in processes of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fresh
import pytest
from narrowfuzz.triage.verify import RunScript
from own_models.test_own_models import ANOTHER_IN_RECOMPUTE, EVERY_SECOND, HEAD, SIZES

pytestmark = pytest.mark.slow
TINY = HEAD + "def build(): return nn.Sequential(nn.Linear(16, 16), nn.GELU()), torch.ones(8, 16)\n"


@dataclass(frozen=True)
class Ran:
    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


def narrowfuzz(here: Path, *argv: str) -> Ran:
    """The command in a folder, on one worker."""
    ran = fresh.command(*argv, cwd=here, seconds=300, code=None)
    return Ran(ran.returncode, ran.stdout + ran.stderr, here / "out")


def check(here: Path, model: str, *argv: str) -> Ran:
    return narrowfuzz(here, "check", model, "--workers", "1", "--seed", "1", "--out", "out", *argv)


@pytest.mark.heavy
def test_of_a_model_without_problems_it_is_said_what_was_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TINY)
    ran = check(tmp_path, "mine.py:build", "--cases", "14", "--checkpoint", "full")
    assert ran.code == 0, ran.output
    head, rest = ran.output.split("narrowfuzz 0", 1)
    assert head.startswith("no --recipe given: testing torch.fp32, ")
    assert "mine.py:build: 1 linear; torch.fp32, --compile none, --checkpoint full" in head
    assert "No problems found in mine.py:build. " in rest and "sound" not in rest
    assert "1 of 1 linear one by one" in rest and "Not checked: " in rest
    kinds = re.search(r"(\d+) kinds of data", rest)
    assert kinds and int(kinds[1]) >= 6  # those of the first cases, and of the random ones
    assert "recomputed (full)" in rest and "a reload" in rest
    assert not ran.summary["lacking"]
    assert "Judged: 3 of 3 combinations" in rest and "12 of 12 first cases ran" in rest
    assert "compared with one process, a batch for each rank" in re.sub(r"\s+", " ", rest)
    assert ran.summary["first_cases"] == {"ran": 12, "of": 12}
    page = re.sub(r"\s+", " ", (ran.folder / "report.html").read_text())
    assert "3 of 3 combinations of" in page and "12 of the 12 cases that a check begins" in page
    assert "eager: 1 of 1 linear checked one by one" in rest
    assert ran.summary["judged"] == {"met": 3, "of": 3} and not ran.summary["never_judged"]


@pytest.mark.heavy
def test_what_its_first_cases_compile_is_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TINY)
    argv = ("--cases", "11", "--compile", "aot_eager")
    counts = check(tmp_path, "mine.py:build", *argv).summary
    assert counts["compiles"] == 1 and counts["compile_seconds"] > 0


Refused = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """What ``check`` says of a model and options that it refuses before anything runs, here."""
    monkeypatch.chdir(tmp_path)

    def refused(source: str, *argv: str) -> str:
        (tmp_path / "mine.py").write_text(source)
        assert fresh.ends("check", "mine.py:build", "--out", "out", *argv) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return refused


def test_a_forward_that_differs_is_said_before_anything_runs(refused: Refused) -> None:
    (line,) = refused(HEAD + EVERY_SECOND.format(every=2), "--minutes", "1").strip().splitlines()
    assert "blocks.1 (EverySecond)" in line


@pytest.mark.heavy
def test_of_a_run_that_is_not_green_it_is_said_why(tmp_path: Path) -> None:
    """Its first cases did not all happen; and parameters without a gradient are noted."""
    idle = TINY.replace("nn.GELU()", "Idle()") + (
        "class Idle(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.shift = nn.Parameter(torch.zeros(16))\n"
        "    def forward(self, x): return x\n"
    )
    (tmp_path / "mine.py").write_text(idle)
    ran = check(tmp_path, "mine.py:build", "--cases", "3", "--min-judged", "0")
    assert "no gradient reaches 1.shift in one call" in ran.output, ran.output
    assert ran.code == 4, ran.output
    assert "only 3 of its first 12 cases were tried" in ran.output.strip().splitlines()[-1]
    assert ran.summary["lacking"] and not ran.summary["findings"]


def test_arms_are_those_of_the_configuration(refused: Refused) -> None:
    said = refused(TINY, "--checkpoint", "full", "--arm", "inductor*")
    assert (
        "runs eager, eager+checkpoint, sharded+checkpoint; --compile and --checkpoint say more"
        in said
    )


@pytest.mark.parametrize(
    ("only", "says"),
    [
        ("up", "no linear is called 'up' (of --filter 'up'): the linears of mine.py:build are 0"),
        ("!up", "no linear is called 'up' (of --filter '!up')"),
        ("!0", "--filter '!0' leaves no linear to convert"),
    ],
)
def test_a_filter_that_leaves_nothing_names_the_linears(
    refused: Refused, only: str, says: str
) -> None:
    assert says in refused(TINY, "--recipe", "torchao.float8.rowwise", "--filter", only)


@pytest.mark.heavy
def test_a_filter_and_other_sizes_are_said_and_judged(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + SIZES)
    ran = check(
        tmp_path, "mine.py:build", "--recipe", "torchao.float8.rowwise", "--filter", "0",
        "--cases", "29",
    )  # fmt: skip
    assert ran.code == 0, ran.output
    assert "mine.py:build: 1 linear and 7 other sizes; torchao.float8.rowwise@0" in ran.output
    assert ran.summary["judged"] == {"met": 2, "of": 2}


@pytest.mark.heavy
def test_a_bug_of_the_users_own_is_named_by_its_layer_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    scripts: RunScript,
) -> None:  # fmt: skip
    (tmp_path / "mine.py").write_text(HEAD + ANOTHER_IN_RECOMPUTE)
    ran = check(
        tmp_path,
        "mine.py:build",
        "--cases",
        "2",
        "--minutes",
        "0.5",
        "--checkpoint",
        "full",
        "--arm",
        "eager",
        "--arm",
        "eager+*",
    )
    assert ran.code == 1, ran.output
    assert "Found " in ran.output and " in mine.py:build (" in ran.output
    assert ran.summary["soundness"].startswith("Found ")
    (found,) = [f for f in ran.summary["findings"] if f["sentence"].startswith("model.feed_forw")]
    assert found["sentence"].startswith("model.feed_forward: "), found["sentence"]
    folder = ran.folder / "findings" / found["id"]
    (tmp_path / "other.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    for model, code in (("mine.py:build", 1), ("other.py:build", 2)):
        assert fresh.ends("replay", str(folder), "--model", model) == code
    assert "is about mine.py:build, not about other.py:build" in capsys.readouterr().err
    assert scripts(folder / "repro.py").code == 1


@pytest.mark.heavy
def test_run_takes_models_by_name_and_of_ones_own_and_says_which_it_never_met(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(TINY)
    ran = narrowfuzz(
        tmp_path, "run", "--model", "mine.py:build", "--model", "mlp_*", "--recipe", "torch.fp32",
        "--arm", "eager", "--cases", "1", "--workers", "1", "--seed", "1", "--out", "out",
        "--min-judged", "100",
    )  # fmt: skip
    assert ran.code == 4, ran.output
    assert ran.summary["judged"] == {"met": 1, "of": 3}
    names = " ".join(ran.summary["never_judged"])
    assert sum(name in names for name in ("mine.py:build", "mlp_gelu", "mlp_swiglu")) == 2


def test_a_recipe_of_other_dtypes_than_the_models_is_refused(refused: Refused) -> None:
    """The model is not cast: it would be judged by the rules of a dtype that it does not have."""
    said = refused(TINY, "--recipe", "torch.bf16")
    assert "torch.bf16 takes bf16 parameters, and those of mine.py:build are fp32" in said
    assert "torch.fp32 leaves it as it is" in said


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("build", "linears", "calls"),
    [("grouped", 5, {"products of groups", "sort", "topk"}), ("loop", 17, {"index_add_", "topk"})],
)
def test_every_call_of_a_mixture_of_experts_is_judged(
    tmp_path: Path, build: str, linears: int, calls: set[str]
) -> None:
    """Of the shipped examples: nothing is left out, and nothing is found but what is known."""
    file = Path(__file__).parents[2] / "examples" / "own_model" / "experts.py"
    ran = check(tmp_path, f"{file}:{build}", "--cases", "12")
    assert ran.code == 0, ran.output
    said = re.sub(r"\s+", " ", ran.output)
    assert f"{linears} of {linears} linears one by one" in said
    judged = said.partition("call by call ")[2].partition(". ")[0]
    assert all(name in judged for name in ("RMS norms", *calls)), judged
    assert "Not checked: " in said and "formulas that combine these calls" in said
