"""Make ``import transformer_engine.pytorch`` work on a machine without a GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import warnings
from pathlib import Path

import torch

from te_on_cpu import cuda_names
from te_on_cpu.v1_loader import install_v1
from te_on_cpu.v1_names import EXTENSION

#: The supported versions, as shown to users: 1.x by minor version, 2.x exactly. (The package 1.9.0
#: is empty.)
SUPPORTED = (
    *("1.9.0.post1", "1.10.*", "1.11.*", "1.12.*", "1.13.*"),
    *("2.4.0", "2.5.0", "2.6.0.post1", "2.7.0", "2.8.0", "2.9.0", "2.10.0", "2.11.0"),
    *("2.12.0", "2.13.0", "2.14.1", "2.15.0", "2.16.1", "2.17.1", "2.18.0", "2.19.0", "2.20.2"),
)
_installed: list[str] = []


def is_supported(version: str) -> bool:
    """True if the emulation supports TransformerEngine ``version``."""
    return any(
        version == known or (known.endswith("*") and version.startswith(known[:-1]))
        for known in SUPPORTED
    )


def install() -> str:
    """Import the installed TransformerEngine on the CPU, until the end of this process. Returns its
    version.

    Patches torch: call it in a process that tests TransformerEngine and nothing else. A second
    call does nothing. Raises ValueError if TransformerEngine is not installed, its version is not
    supported, it is already imported, or the real one can run here.
    """
    if _installed:
        return _installed[0]
    version = _version()
    if "transformer_engine" in sys.modules:
        raise ValueError(
            "transformer_engine is imported already, without the CPU emulation; "
            "call install() before it is imported, in a process of its own."
        )
    if has_extension() and torch.cuda.is_available():
        raise ValueError(
            f"TransformerEngine {version} with its compiled extension and a CUDA device are here; "
            "use them as they are, the CPU emulation is for machines without."
        )
    cuda_names.patch()
    with warnings.catch_warnings():  # the library filters warnings of the whole process
        if version.startswith("1."):
            install_v1(version)
        else:
            # Imported here, so that 1.x and 2.x do not depend on each other.
            from te_on_cpu.v2 import install_v2

            install_v2(version)
    _installed.append(version)
    return version


def _version() -> str:
    wanted = f"install one of {', '.join(SUPPORTED)}"
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"transformer_engine is not installed; {wanted} (pip install --no-deps "
            "transformer_engine==VERSION), or let te_on_cpu.environment do it."
        ) from None
    if not is_supported(version):
        raise ValueError(f"The CPU emulation does not carry TransformerEngine {version}; {wanted}.")
    return version


def has_extension() -> bool:
    """True if there is a compiled extension where TransformerEngine searches for it."""
    # Not importlib.util.find_spec: once the emulation is imported, it would find that.
    if importlib.machinery.PathFinder.find_spec(EXTENSION) is not None:
        return True
    root = importlib.util.find_spec("transformer_engine")
    folders = [Path(at) for at in (root and root.submodule_search_locations) or ()]
    return any(
        True for at in folders for where in (at, at.parent) for _ in where.glob(f"{EXTENSION}.*.so")
    )
