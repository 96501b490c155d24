"""Releases of a package on the index, and the environment that runs each of them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version
from te_on_cpu.environment import VERSION_VARIABLE, chosen_version, worker_environment
from te_on_cpu.install import SUPPORTED, is_supported

from narrowfuzz.machine.overlay import folder_of, release_folder

TRANSFORMER_ENGINE = "transformer_engine"
_OFFERED = "Available versions: "
_INTERPRETS = {"TRITON_INTERPRET": "1"}


@dataclass(frozen=True)
class ReleaseEnvironment:
    """How a script's process imports a release: the folders that come first on its path, and its
    environment variables."""

    folders: tuple[Path, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def changed_variables(self) -> dict[str, str]:
        """The variables that differ from those of this process."""
        inherited = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, [*map(str, self.folders), inherited]))
        return {**({"PYTHONPATH": path} if path else {}), **self.variables}


def releases(package: str) -> list[str]:
    """The releases of a package that the index offers this Python, from the oldest to the newest,
    without pre-releases and local versions. Raises ValueError if it offers none."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check"]
    done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    offered = [line for line in done.stdout.splitlines() if line.startswith(_OFFERED)]
    if done.returncode or not offered:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ValueError(f"--package {package}: the index offers no release of it ({last})")
    found = [text.strip() for text in offered[0].removeprefix(_OFFERED).split(",")]
    if package == TRANSFORMER_ENGINE:
        found = [version for version in found if is_supported(version)]
    return sorted(filter(_is_release, found), key=Version)


def _is_release(text: str) -> bool:
    try:
        version = Version(text)
        return not (version.is_prerelease or version.local)
    except InvalidVersion:
        return False


def here(package: str) -> str:
    """The version that is used here, without its local part; "" if there is none."""
    if package == TRANSFORMER_ENGINE:
        return chosen_version()
    try:
        return Version(importlib.metadata.version(package)).public
    except importlib.metadata.PackageNotFoundError:
        return ""


def release_environment(package: str, version: str, others: Sequence[str]) -> ReleaseEnvironment:
    """The environment in which this release runs, over ``others`` (PACKAGE==VERSION) and what is
    installed. Raises ValueError if it cannot be installed, or the emulated extension does not
    support it."""
    folders = tuple(folder_of(other) for other in others)
    if package == TRANSFORMER_ENGINE:
        if not is_supported(version):
            raise ValueError(
                f"the emulation does not support transformer_engine {version}; supported: "
                f"{', '.join(SUPPORTED)}"
            )
        worker_environment(version, {})  # this installs it
        return ReleaseEnvironment(folders, {**_interprets(folders), VERSION_VARIABLE: version})
    own = () if version == here(package) else (release_folder(package, version),)
    # the Triton of a torch for GPUs stays as it is
    interpreted = folders if package == "torch" else (*own, *folders)
    variables = _INTERPRETS if package == "triton" else _interprets(interpreted)
    return ReleaseEnvironment((*own, *folders), variables)


def _interprets(folders: Sequence[Path]) -> dict[str, str]:
    """What lets Triton run on a CPU, if one of these folders has it."""
    there = any((folder / "triton").is_dir() for folder in folders)
    return _INTERPRETS if there else {}


def compared(package: str, before: str, after: str) -> str:
    """URL of the changes between two releases; "" if the package does not name a repository on
    GitHub."""
    try:
        metadata = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    urls = [*(metadata.get_all("Home-page") or []), *(metadata.get_all("Project-URL") or [])]
    for url in (text.rpartition(" ")[2].rstrip("/") for text in urls if text):
        if url.startswith("https://github.com/") and url.count("/") == 4:
            return f"{url}/compare/v{before}...v{after}"
    return ""
