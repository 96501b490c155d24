"""TransformerEngine 1.x on the CPU emulation of its extension: many checks, a process a version."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from te_on_cpu.environment import worker_environment

CHECKS = Path(__file__).parents[1] / "te_on_cpu_v1_checks.py"
NAMES = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)


@functools.cache
def failures(version: str, folder: Path) -> dict[str, str]:
    """What failed with TransformerEngine ``version``, by check; every check is a key."""
    try:
        environment = worker_environment(version, os.environ)
    except ValueError as missing:
        pytest.skip(str(missing))
    report = folder / f"{version}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_functions=check_*", str(CHECKS)]
    options = [f"--junitxml={report}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert sorted(case.attrib["name"] for case in cases) == sorted(NAMES)
    return {
        case.attrib["name"]: "".join(bad.text or "" for bad in case if bad.tag != "system-out")
        for case in cases
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("te_on_cpu_v1")


@pytest.mark.parametrize(
    "version",
    [  # all checks of one run in one process
        pytest.param("1.10.0", marks=pytest.mark.heavy),
        pytest.param("1.11.0", marks=pytest.mark.heavy),
        pytest.param("1.12.0", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, version: str, folder: Path) -> None:
    failure = failures(version, folder)[name]
    assert not failure, failure
