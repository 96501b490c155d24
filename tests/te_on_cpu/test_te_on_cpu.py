"""TransformerEngine on the CPU emulation of its extension: many checks, in a process for each
release and for each compute capability that 2.x is told of."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fresh import HERE, on_transformer_engine, python
from narrowfuzz.machine.overlay import folder_of
from narrowfuzz.models.te_experts import TE_EXPERTS
from te_on_cpu.environment import real_extension, worker_environment

#: Version, and the capability that it is told of -> what is checked on it, and how it is marked.
V1 = ((HERE / "te_on_cpu_v1_checks.py",), ())
Run = tuple[tuple[Path, ...], tuple[str, ...]]


def v2(*names: str) -> Run:
    every = ("v2", "casts", "state", "native", *names)
    files = tuple(HERE / f"te_on_cpu_{name}_checks.py" for name in every)
    return files, ("-p", "te_on_cpu_v2_plugin")


V2 = v2("fp4", "experts")
RUNS: dict[tuple[str, str], tuple[Run, list[pytest.MarkDecorator]]] = {
    ("1.9.0.post1", ""): (V1, [pytest.mark.heavy]),
    ("1.10.0", ""): (V1, [pytest.mark.heavy]),
    ("1.11.0", ""): (V1, [pytest.mark.heavy]),
    ("1.12.0", ""): (V1, [pytest.mark.heavy]),
    ("1.13.0", ""): (V1, [pytest.mark.heavy]),
    ("2.4.0", "[10, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.5.0", "[9, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.6.0.post1", "[10, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.7.0", "[9, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.8.0", "[10, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.9.0", "[9, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.10.0", "[10, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.11.0", "[9, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.12.0", "[9, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.13.0", "[10, 0]"): (v2(), [pytest.mark.heavy]),
    ("2.14.1", "[9, 0]"): (v2("fp4"), [pytest.mark.heavy]),
    ("2.15.0", "[9, 0]"): (v2("fp4"), [pytest.mark.heavy]),
    ("2.16.1", "[10, 0]"): (v2("fp4"), [pytest.mark.heavy]),
    ("2.17.1", "[10, 0]"): (v2("fp4"), [pytest.mark.heavy]),
    ("2.18.0", "[10, 0]"): (V2, [pytest.mark.heavy]),
    ("2.19.0", "[9, 0]"): (V2, [pytest.mark.heavy]),
    ("2.20.2", "[9, 0]"): (V2, [pytest.mark.xdist_group("te 9"), pytest.mark.heavy]),
    ("2.20.2", "[10, 0]"): (V2, [pytest.mark.xdist_group("te 10")]),
}


def names(checks: tuple[Path, ...]) -> list[str]:
    files = "\n".join(file.read_text() for file in checks)
    return re.findall(r"^def (check_\w+)", files, re.MULTILINE)


def every_check() -> list[Any]:
    return [
        pytest.param(run, name, marks=marks, id=f"{' '.join(run).strip()}-{name}")
        for run, ((checks, _), marks) in RUNS.items()
        for name in names(checks)
    ]


@functools.cache
def failures(run: tuple[str, str], folder: Path) -> dict[str, str]:
    """What failed in a run, by check; every check is a key."""
    (version, capability), ((checks, options), _) = run, RUNS[run]
    try:
        environment = (
            dict(os.environ) if real_extension() else worker_environment(version, os.environ)
        )
    except ValueError as why:
        pytest.skip(str(why))
    environment["PYTHONPATH"] = os.pathsep.join((environment.get("PYTHONPATH", ""), str(HERE)))
    if capability:
        environment["TE_CAPABILITY"] = capability
    report = folder / f"{version} {capability}.xml"
    done = python(
        "-m", "pytest", *options, "-q", "-o", "python_functions=check_*", f"--junitxml={report}",
        "-p", "no:cacheprovider", *checks, env=environment, code=None,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].split("[")[0]
        bad = "".join(one.text or "" for one in case if one.tag in ("failure", "error"))
        found[name] = found.get(name, "") + bad
    assert found.keys() == {*names(checks)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("te_on_cpu")


@pytest.mark.parametrize(("run", "name"), every_check())
def test_check(run: tuple[str, str], name: str, folder: Path) -> None:
    failure = failures(run, folder)[name]
    assert not failure, failure


@pytest.mark.heavy
@pytest.mark.parametrize(
    "version",
    [
        "2.18.0",
        *(
            pytest.param(version, marks=pytest.mark.heavy)
            for version in (
                *("1.12.0", "1.13.0", "2.4.0", "2.5.0", "2.6.0.post1", "2.7.0", "2.8.0"),
                *("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"),
                *("2.16.1", "2.17.1", "2.19.0", "2.20.2"),
            )
        ),
    ],
)
def test_a_release_trains_a_checkpointed_layer(version: str) -> None:
    # 448 / 4 and 448 / 0.5 in E4M3, and 57344 / 2 in E5M2
    assert on_transformer_engine("te_two_steps.py", version=version) == ["112.0 896.0 28672.0"]


@pytest.mark.heavy
def test_tokens_moved_by_a_mask_are_judged_in_tritons_interpreter() -> None:
    environment = worker_environment("2.20.2", os.environ)
    paths = (environment["PYTHONPATH"], str(folder_of("triton==3.6.0")), str(HERE))
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    names = [model.name for model in TE_EXPERTS if model.interpreted]
    done = python(
        "-m", "pytest", "-p", "te_on_cpu_v2_plugin", "-q", "-o", "python_functions=check_*",
        "-p", "no:cacheprovider", "-k", f"(bounds or wrong) and ({' or '.join(names)})",
        HERE / "te_on_cpu_experts_checks.py", env=environment,
    )  # fmt: skip
    assert f"{3 * len(names)} passed" in done.stdout, done.stdout
