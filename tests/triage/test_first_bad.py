"""Where a finding's first NaN stands: its script, as ``watch`` sees it, on one rank or several."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import planted
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.trace.address import At
from narrowfuzz.triage.finding import Finding, Triaged
from narrowfuzz.triage.first_bad import first_bad, with_first_bad
from narrowfuzz.triage.needs import needless_of
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.script.ranks import of_ranks
from samples import recipes

MADE = """
import sys, torch
x = torch.ones(4, requires_grad=True)
y = torch.log(x - 2)
y.sum().backward()
sys.exit(1)
"""


def told(script: str, plant: tuple[str, str] | None = None) -> list[str]:
    return first_bad(script, plant=plant, device="cpu", seconds=100.0)


def seen(script: str, **fields: Any) -> list[str]:
    """What a finding with that script says of it."""
    done = Triaged(_finding(**({"effect": "inf", "reach": "gaussian"} | fields)), script)
    return with_first_bad(done, plant=None, device="cpu", seconds=100.0).finding.first_bad


def test_it_names_operator_operands_and_what_came_again() -> None:
    lines = seen(MADE)
    assert lines[0] == "first NaN: step 1, rank 0, forward, operator aten.log"
    assert lines[1].endswith("at repro.py:4 in <module>") and "self (float32 4): finite" in lines[2]
    assert "it gave the same bits" in lines[-1]


@pytest.mark.heavy
def test_a_huge_number_alone_is_no_bad_value() -> None:
    """A scale of an MX format is a power of two up to 2^127."""
    assert told("import torch; torch.exp2(torch.full((3,), 100.0)).sum()") == []


@pytest.mark.heavy
@pytest.mark.one_in(2)
@pytest.mark.parametrize("sharding", [{"data": 2}, {"data": 2, "tensor": 2}])
def test_on_ranks_it_names_the_rank(sharding: dict[str, Any]) -> None:
    spec = Spec(recipe="torch.bf16", m=32, k=32, n=32, sharding=Sharding(**sharding))
    case, recipe = Case(spec=spec, data=DataSpec(seed=3)), recipes()["torch.bf16"]
    assert isinstance(recipe, Recipe)
    plant = ("", "rank-makes-nan")
    with planted(*plant):
        verdict = Judge({recipe.name: recipe}, Ledger([])).judge(case).causes[0]
    script = write_played_script(of_ranks(case, verdict, recipe, tensors_of(case, recipe)))
    first = told(script, plant)[0]
    assert first.startswith("first NaN: step 1, rank 1, forward") and first.endswith("aten.log")


@pytest.mark.parametrize(
    "fields", [{"effect": 0.5}, {"reach": "inf_nan"}, {"why_suspected": "its script passes"}]
)
def test_only_of_what_is_confirmed_and_made_of_numbers(fields: dict[str, Any]) -> None:
    assert not seen(MADE, **fields)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # dead, and nobody has asked for it yet


def _finding(**fields: Any) -> Finding:
    case = Case(spec=Spec(recipe="torch.bf16"), data=DataSpec())
    return Finding(
        id="1", fingerprint="x", severity="low", recipe="torch.bf16", rule="O5", arm="eager",
        role="output", symptom="not finite", sentence="", strength="exact", case=case,
        minimal=case, flake="always", **fields,
    )  # fmt: skip


def test_what_the_drawn_case_has_and_the_smallest_has_not_is_not_needed() -> None:
    minimal = Case(spec=Spec(recipe="torch.bf16", sharding=Sharding(data=2)), data=DataSpec())
    drawn = msgspec.structs.replace(
        minimal,
        spec=msgspec.structs.replace(
            minimal.spec, bias=True, sharding=Sharding(data=4, units="each")
        ),
    )
    verdict: Any = SimpleNamespace(arm="sharded", at=At(what="parameter"))
    assert needless_of(drawn, minimal, verdict) == ["bias=True", "units=each"]


@pytest.mark.heavy
def test_nothing_is_left_of_a_script_whose_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    hangs = f"""
import os, time
if os.fork() == 0:
    open({str(file)!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    assert first_bad(hangs, plant=None, device="cpu", seconds=6.0) == []
    time.sleep(0.5)
    assert not _runs(int(file.read_text()))


@pytest.mark.heavy
def test_its_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told(MADE)
    assert not list(tmp_path.glob("narrowfuzz-first-*"))
