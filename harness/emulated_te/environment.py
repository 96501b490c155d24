"""A folder per TransformerEngine version: its Python package alone, installed when first wanted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from harness.emulated_te.install import CARRIED, carried

#: What its Python package imports. torch stays that of the running environment.
_NEEDS = ("pydantic", "packaging", "einops", "importlib-metadata")


def cache() -> Path:
    """Where the folders lie: $NARROWFUZZ_CACHE/te, or ~/.cache/narrowfuzz/te."""
    root = os.environ.get("NARROWFUZZ_CACHE")
    return Path(root or Path.home() / ".cache" / "narrowfuzz") / "te"


def ensure(version: str) -> Path:
    """The folder that holds exactly TransformerEngine ``version``; made on the first call.

    Asks pip, so the first call needs a package index. Processes may race: whoever is done first
    wins, nobody sees half a folder. Raises ValueError for a version that is not carried, or if pip
    fails.
    """
    if not carried(version):
        raise ValueError(
            f"The CPU emulation does not carry TransformerEngine {version!r}; "
            f"use one of {', '.join(CARRIED)}."
        )
    folder = cache() / f"{version}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _pip(building, "--no-deps", f"transformer_engine=={version}")
        _pip(building, *_NEEDS)
        _keep(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def worker_environment(version: str, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a child process that imports TransformerEngine ``version`` and no other."""
    path = [str(ensure(version)), environ.get("PYTHONPATH", "")]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        # The package must neither load CUDA libraries nor compile its small functions.
        "NVTE_PROJECT_BUILDING": "1",
        "NVTE_TORCH_COMPILE": "0",
    }


def _pip(folder: Path, *what: str) -> None:
    """Install ``what`` into ``folder``, from wheels only: nothing is built."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--no-compile", "--target", str(folder), *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"pip could not install {' '.join(what)}: {last}")


def _keep(building: Path, folder: Path) -> None:
    try:
        building.rename(folder)
    except OSError:
        # Another process was faster; its folder is as good.
        if not folder.is_dir():
            raise
