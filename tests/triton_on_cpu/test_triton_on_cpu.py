"""Triton's kernels on a CPU: checks in a process of their own, for the interpreter is patched."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fresh import HERE, python
from narrowfuzz.machine.overlay import folder_of

CHECKS = HERE / "triton_on_cpu_checks.py"
HEAVY = re.findall(
    r"^@pytest.mark.heavy\n(?:@.*\n)*def (check_\w+)", CHECKS.read_text(), re.MULTILINE
)
NAMES = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)
TRITON = "triton==3.6.0"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Triton is nobody's dependency here: it lies in a folder of its own."""
    return {"PYTHONPATH": os.pathsep.join([str(folder_of(TRITON)), str(HERE)])}


def _checked(chosen: str, environment: dict[str, str], report: Path) -> dict[str, str]:
    """What failed of the checks that pytest's -m chooses, by their names."""
    done = python(
        "-m", "pytest", "-q", "-o", "python_functions=check_*", f"--junitxml={report}",
        "-m", chosen, "-p", "no:cacheprovider", CHECKS,
        env={**environment, "TRITON_INTERPRET": "1"}, code=None,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        said = "".join(part.text or "" for part in case.iter("failure"))
        found[name] = found.get(name, "") + said
    return found


@pytest.fixture(scope="module")
def failures(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return _checked("not heavy", environment, tmp_path_factory.mktemp("triton") / "report.xml")


@pytest.mark.heavy
def test_the_other_rows(environment: dict[str, str], tmp_path: Path) -> None:
    found = _checked("heavy", environment, tmp_path / "report.xml")
    assert len(found) > 3 and not any(found.values()), found


@pytest.mark.xdist_group("triton")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HEAVY])
def test_check(name: str, failures: dict[str, str]) -> None:
    assert failures[name] == ""


@pytest.mark.xdist_group("triton")
def test_without_triton_it_says_what_to_install() -> None:
    done = python("-c", "import triton_on_cpu; triton_on_cpu.install()", code=None)
    assert "there is no Triton: pip install triton==3.6.0" in done.stderr


@pytest.mark.one_in(2)
@pytest.mark.xdist_group("triton")
@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("import triton", "Triton is imported already, without its interpreter"),
        (
            "import os; os.environ['TRITON_INTERPRET'] = '1'; "
            "from triton.runtime import interpreter as i; del i.ScanOps",
            "is another than that of 3.6: it has no ScanOps",
        ),
    ],
)
def test_another_triton_is_refused(before: str, says: str, environment: dict[str, str]) -> None:
    program = f"{before}; import triton_on_cpu; triton_on_cpu.install()"
    done = python("-c", program, env={**environment, "TRITON_INTERPRET": None}, code=None)
    assert says in done.stderr


@pytest.mark.heavy
@pytest.mark.xdist_group("triton")
def test_an_older_torchao_is_left_as_it_is(environment: dict[str, str]) -> None:
    """torchtitan 0.1 and its torchao are under test over Triton as well, in their own way."""
    program = (
        "import importlib.metadata as m, sys; m.version = lambda name: '0.11.0'; "
        "import narrowfuzz.campaign.preload_torchao; "
        "print('triton_on_cpu.repairs' in sys.modules); "
        "import triton_on_cpu; triton_on_cpu.install_torchao()"
    )
    done = python("-c", program, env={**environment, "TRITON_INTERPRET": "1"}, code=None)
    assert done.stdout.split() == ["False"]
    assert "Triton's kernels have its interpreter's numbers" in done.stderr
    assert "torchao's kernels are known from 0.18 on; 0.11.0 is installed" in done.stderr


@pytest.mark.heavy
@pytest.mark.xdist_group("triton")
def test_workers_start_where_triton_is_asked_for_and_not_there() -> None:
    program = "import narrowfuzz.campaign.preload_torchao, sys; print('torchao' in sys.modules)"
    done = python("-c", program, env={"TRITON_INTERPRET": "1"})
    assert done.stdout.split() == ["True"]


#: A campaign on a CPU over Triton's interpreter.
INTERPRETED = ("-m", "narrowfuzz", "run", "--with", TRITON, "--arm", "eager", "--workers", "1")


@pytest.mark.heavy
@pytest.mark.xdist_group("triton")
def test_blockwise_fp8_is_judged_on_a_cpu(tmp_path: Path) -> None:
    command = ("--recipe", "torchao.blockwise_fp8", "--cases", "6", "--seed", "1")
    done = python(*INTERPRETED, *command, "--out", tmp_path / "run")
    assert "6 cases of" in done.stdout and "New findings: 0" in done.stdout, done.stdout
