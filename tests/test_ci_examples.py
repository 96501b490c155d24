"""``examples/ci``: every step that is a command runs, on a CPU and on few cases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / "examples" / "ci").glob("*.yml"))
#: ``run: command``, or ``run: |`` with the lines below that stand further in.
_STEP = re.compile(r"^ +(?:- )?run: (?:\|\n((?: {10,}.*\n)+)|(.+)\n)", re.M)
_INSTALL = 'python -m venv env && env/bin/pip install --quiet "narrowfuzz[torchao]"'
ENVIRONMENT = {
    "DEVICE": "cpu", "CASES": "30", "RECIPES": "torch.fp32", "MINUTES": "0.1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def steps(workflow: Path) -> list[str]:
    found = _STEP.findall(workflow.read_text())
    return [textwrap.dedent(block) or line for block, line in found]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_reads_from_its_environment_it_sets(workflow: Path) -> None:
    text = workflow.read_text()
    used = set(re.findall(r'"\$([A-Z]+)"', text))
    assert used and used <= set(re.findall(r"^  ([A-Z]+):", text, re.M))
    assert steps(workflow).count(_INSTALL) == 1 and len(steps(workflow)) >= 3


@pytest.mark.heavy
@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_of_a_workflow_runs(workflow: Path, tmp_path: Path) -> None:
    """But the one that installs, whose work is done here."""
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    (programs / "narrowfuzz").symlink_to(Path(sys.executable).parent / "narrowfuzz")
    page = tmp_path / "page.md"
    for night in range(2 if "nightly" in workflow.name else 1):
        for step in steps(workflow):
            if step == _INSTALL:
                continue
            ran = subprocess.run(
                ["bash", "-e", "-c", step], cwd=tmp_path,
                env=os.environ | ENVIRONMENT | {"GITHUB_STEP_SUMMARY": str(page)},
                capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert ran.returncode == 0, f"{step}\n{ran.stdout}{ran.stderr}"
        assert page.read_text().count("## narrowfuzz: New findings: ") == night + 1
        if night == 0 and (tmp_path / "night").exists():
            (kept,) = (tmp_path / "nights").glob("*/findings.db")
            assert kept.is_file()
            (tmp_path / "night").rename(tmp_path / "gone")
