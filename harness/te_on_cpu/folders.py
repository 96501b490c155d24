"""Folders of packages in addition to the running environment's, installed on first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def installed(
    folder: Path, *groups: tuple[str, ...], complete: Callable[[Path], None] | None = None
) -> Path:
    """``folder``, made on the first call: pip installs each group of its arguments into it, then
    ``complete`` may add to it.

    The first call needs a package index. Only wheels are installed, nothing is built. Processes may
    race: the first to finish wins, and none sees an incomplete folder. Raises ValueError if pip
    fails.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for group in groups:
            pip(building, *group)
        if complete is not None:
            complete(building)
        _keep(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def pip(folder: Path, *what: str) -> None:
    """Install ``what`` into ``folder``. Raises ValueError with the last line that pip printed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--no-compile", "--target", str(folder), *what],
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
        # Another process was faster: use its folder.
        if not folder.is_dir():
            raise
