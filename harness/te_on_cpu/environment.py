"""One folder per TransformerEngine version with only its Python package, installed on first use."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from te_on_cpu.folders import installed
from te_on_cpu.install import SUPPORTED, has_extension, install, is_supported

#: Packages that its Python code imports. torch is that of the running environment.
_NEEDS = ("pydantic", "packaging", "einops", "importlib-metadata")


def cache() -> Path:
    """The folder that contains them: $TE_ON_CPU_CACHE, or ~/.cache/te_on_cpu."""
    root = os.environ.get("TE_ON_CPU_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "te_on_cpu"


def ensure(version: str) -> Path:
    """The folder that holds exactly TransformerEngine ``version``; made on the first call.

    Raises ValueError for a version that the emulation does not support, and like ``installed``.
    """
    if not is_supported(version):
        raise ValueError(
            f"The CPU emulation does not carry TransformerEngine {version!r}; "
            f"use one of {', '.join(SUPPORTED)}."
        )
    folder = cache() / f"{version}-{sys.implementation.cache_tag}"
    return installed(folder, ("--no-deps", f"transformer_engine=={version}"), _NEEDS)


def worker_environment(version: str, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ``, extended for a child process that imports exactly this TransformerEngine."""
    path = [str(ensure(version)), environ.get("PYTHONPATH", "")]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        # The package must not load CUDA libraries or compile its small functions.
        "NVTE_PROJECT_BUILDING": "1",
        "NVTE_TORCH_COMPILE": "0",
    }


#: The version that is tested by default.
DEFAULT = "2.20.2"
#: Environment variable that carries the choice to worker processes and scripts.
VERSION_VARIABLE = "TE_ON_CPU_VERSION"
#: Its former name, which scripts of earlier findings import.
CHOICE = VERSION_VARIABLE


def chosen_version() -> str:
    """The TransformerEngine version under test; the installed one if it has its extension."""
    if real_extension():
        return importlib.metadata.version("transformer_engine")
    return os.environ.get(VERSION_VARIABLE, DEFAULT)


@functools.cache
def real_extension() -> bool:
    """True if TransformerEngine is installed with its compiled extension, on a GPU machine."""
    return has_extension() and torch.cuda.is_available()


def provide() -> None:
    """Install the chosen version if that is necessary. Raises ValueError like ``ensure``."""
    if not real_extension():
        ensure(chosen_version())


def enter() -> None:
    """Set up this process, until its end, to test TransformerEngine: the real one if it can run
    here, otherwise the chosen version on the emulated extension."""
    if real_extension():
        return
    version = chosen_version()
    folder = str(ensure(version))
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    os.environ.update(NVTE_PROJECT_BUILDING="1", NVTE_TORCH_COMPILE="0")
    found = install()
    assert found == version, (found, version)


def choose(version: str) -> None:
    """Test this version in all processes started from now on; install it if that is necessary.

    Raises ValueError like ``ensure``.
    """
    ensure(version)
    os.environ[VERSION_VARIABLE] = version


def description() -> str:
    """The TransformerEngine version under test, and whether its own extension runs, as text."""
    how = "its own extension" if real_extension() else "its Python on the emulated extension"
    return f"{chosen_version()} ({how})"
