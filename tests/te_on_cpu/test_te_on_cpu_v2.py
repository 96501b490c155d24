"""TransformerEngine 2.x on the CPU emulation of its extension: many checks in one process."""

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

HERE = Path(__file__).parents[1]
CHECKS = HERE / "te_on_cpu_v2_checks.py"
NAMES = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)


@functools.cache
def failures(capability: str, folder: Path) -> dict[str, str]:
    """What failed, by check; every check is a key."""
    try:
        environment = worker_environment("2.20.2", os.environ)
    except ValueError as why:
        pytest.skip(str(why))
    environment["TE_CAPABILITY"] = capability
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "te_on_cpu_v2_plugin", "-q", str(CHECKS)]
    options = ["-o", "python_functions=check_*", f"--junitxml={report}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = dict.fromkeys(NAMES, "")
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].split("[")[0]
        found[name] += "".join(bad.text or "" for bad in case if bad.tag in ("failure", "error"))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("te_on_cpu_v2")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "capability",
    [  # all checks of one run in one process
        pytest.param("[9, 0]", marks=[pytest.mark.xdist_group("te 9"), pytest.mark.heavy]),
        pytest.param("[10, 0]", marks=pytest.mark.xdist_group("te 10")),
    ],
)
def test_check(name: str, capability: str, folder: Path) -> None:
    failure = failures(capability, folder)[name]
    assert not failure, failure
