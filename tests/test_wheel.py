"""What a wheel installs: three import packages, their content, and no folder of a common name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(source: Path, into: Path) -> set[str]:
    """Every file of the wheel made from ``source``."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(into), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = into.glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.slow
def test_a_wheel_installs_our_packages_and_nothing_else(tmp_path: Path) -> None:
    names = build(ROOT, tmp_path)
    ours = {"narrowfuzz", "narrowfuzz_watch", "te_on_cpu", "triton_on_cpu"}
    assert {name.split("/")[0] for name in names} == ours
    assert "narrowfuzz/_content/recipes/torchao_float8.py" in names
    assert "narrowfuzz/properties/test_rules.py" in names
    assert "narrowfuzz_watch/site/sitecustomize.py" in names
    assert any(name.startswith("narrowfuzz/_content/reports/known/") for name in names)
    assert not [name for name in names if name.endswith(("pyproject.toml", "README.md"))]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("package", ["te_on_cpu", "triton_on_cpu"])
def test_what_stands_in_for_a_gpu_has_a_wheel_of_its_own(package: str, tmp_path: Path) -> None:
    names = build(ROOT / "harness" / package, tmp_path)
    assert names == {f"{package}/{path.name}" for path in (ROOT / "harness" / package).glob("*.py")}
