"""Runs the command with another release of a library: ``--with torchao==0.15.0``.

A folder holds that package and those of its dependencies that the running environment lacks; torch
and everything else stay those of the running environment. The command starts again with the folder
first on its path, so that workers, scripts and this process import the same release.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from te_on_cpu.folders import installed, pip

#: Environment variable with the requirements of ``--with`` under which the command was started.
RELEASES_VARIABLE = "NARROWFUZZ_WITH"
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!_-]*)\Z")
#: Packages that must not be replaced: another release needs another environment.
_NOT_OURS = ("torch", "numpy", "narrowfuzz")
#: Package -> dependencies that it needs and does not declare. torchtitan's casts are Triton
#: kernels, which run on a CPU in Triton's interpreter; 3.6 is the release whose interpreter is
#: known to work.
_UNSAID = {"torchtitan": ("tyro", "tensorboard", "triton==3.6.0")}
#: Release -> files of it that do not import on the supported torch, and what takes their place.
#: torchao 0.12.0 is refused as a whole for a lowering of integer attention, which imports a module
#: that torch has moved since; the one function of it that torchao imports is never called.
_STUBS = {
    "torchao==0.12.0": {
        "torchao/prototype/inductor/int8_sdpa_lowering.py": (
            "def register_int8_sdpa():\n"
            '    raise NotImplementedError("narrowfuzz: this lowering needs an older torch")\n'
        )
    }
}


def restart_with_releases(requirements: Sequence[str]) -> None:
    """Start this command again with these releases first on its path; does nothing if that has been
    done, or if there are no requirements.

    Raises ValueError for a requirement that is not PACKAGE==VERSION, cannot be installed or does
    not import.
    """
    wanted = " ".join(requirements)
    if not wanted or os.environ.get(RELEASES_VARIABLE) == wanted:
        return
    folders = [folder_of(requirement) for requirement in requirements]
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    env = {**os.environ, "PYTHONPATH": path, RELEASES_VARIABLE: wanted}
    if any((folder / "triton").is_dir() for folder in folders):
        # a torch for GPUs includes Triton, so a Triton in these folders runs on a CPU, where only
        # its interpreter works; Triton reads this variable when it is imported
        env["TRITON_INTERPRET"] = "1"
    for requirement in requirements:
        _check_import(requirement, env)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def active_releases() -> tuple[str, ...]:
    """The releases that the command was started with by ``--with``, as PACKAGE==VERSION."""
    return tuple(os.environ.get(RELEASES_VARIABLE, "").split())


def folder_of(requirement: str) -> Path:
    """The folder that holds exactly this release and its missing dependencies; made on the first
    call.

    Raises ValueError for a requirement that is not PACKAGE==VERSION, for a package that must not be
    replaced, or if pip fails.
    """
    parts = _REQUIREMENT.match(requirement)
    if parts is None:
        raise ValueError(f"--with {requirement!r}: write PACKAGE==VERSION, like torchao==0.15.0")
    package, version = parts.groups()
    if package.replace("-", "_") == "transformer_engine":
        raise ValueError(f"--with {requirement}: write --te-version {version}")
    if package in _NOT_OURS:
        raise ValueError(
            f"--with {requirement}: {package} needs an environment of its own; "
            "narrowfuzz compare takes the Pythons of two"
        )
    try:
        return release_folder(package, version)
    except ValueError as error:
        raise ValueError(f"--with {requirement}: {error}") from None


def release_folder(package: str, version: str) -> Path:
    """The folder that holds exactly this release of any package and its missing dependencies; torch
    gets all of its own, which are gigabytes. Made on the first call. Raises ValueError if pip
    fails."""
    folder = _cache() / f"{package}-{version}-{sys.implementation.cache_tag}"
    if package == "torch":
        return installed(folder, (f"{package}=={version}",))
    return installed(folder, ("--no-deps", f"{package}=={version}"), complete=_complete)


def _complete(folder: Path) -> None:
    """Install in a folder the dependencies that its packages lack, round by round, as dependencies
    may lack others. torch, numpy and narrowfuzz themselves are never installed. Files that cannot
    be imported on this torch are replaced."""
    for package in importlib.metadata.distributions(path=[str(folder)]):
        for file, text in _STUBS.get(f"{package.name}=={package.version}", {}).items():
            (folder / file).write_text(text)
    tried: set[str] = set()
    while lacking := sorted(set(_lacking(folder)) - tried):
        tried |= {*lacking}
        pip(folder, "--no-deps", *lacking)


def _lacking(folder: Path) -> Iterator[str]:
    there = [*importlib.metadata.distributions(path=[str(folder)])]
    here = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    here |= {canonicalize_name(d.name): d.version for d in there}
    for package in there:
        for text in (*(package.requires or ()), *_UNSAID.get(package.name, ())):
            needed = Requirement(text)
            if needed.name in _NOT_OURS or (needed.marker and not needed.marker.evaluate()):
                continue
            version = here.get(canonicalize_name(needed.name))
            if version is None or not needed.specifier.contains(version, prereleases=True):
                yield f"{needed.name}{needed.specifier}"


def _cache() -> Path:
    """The folder that contains all others: $NARROWFUZZ_CACHE, or ~/.cache/narrowfuzz."""
    root = os.environ.get("NARROWFUZZ_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "narrowfuzz"


def _check_import(requirement: str, env: dict[str, str]) -> None:
    """Raises ValueError if the release does not import beside what is installed."""
    module = requirement.partition("==")[0].replace("-", "_")
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], env=env, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ValueError(f"--with {requirement}: it does not import here: {last}")
