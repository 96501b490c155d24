"""Folders of packages beside those of the running environment, installed when first wanted."""

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
    """``folder``, with what pip is told to install in it, group by group, and what ``complete``
    adds to that; made on the first call.

    Asks pip, so the first call needs a package index. Wheels only: nothing is built. Processes may
    race: whoever is done first wins, nobody sees half a folder. Raises ValueError if pip fails.
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
    """Install ``what`` into ``folder``. Raises ValueError with pip's own reason."""
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
        # Another process was faster; its folder is as good.
        if not folder.is_dir():
            raise
