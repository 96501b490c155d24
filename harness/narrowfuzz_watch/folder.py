"""The default folder of runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Root of the checkout, if this file is in one: <checkout>/harness/narrowfuzz_watch.
_CHECKOUT = Path(__file__).resolve().parents[2]


def home() -> Path:
    """The folder for folders of runs, relative to the current one: reports/runs in a checkout's
    root, else narrowfuzz-runs."""
    inside = (
        Path.cwd().resolve() == _CHECKOUT
        and Path("harness/narrowfuzz_watch").is_dir()
        and Path("pyproject.toml").is_file()
        and Path("recipes").is_dir()
    )
    return Path("reports/runs" if inside else "narrowfuzz-runs")


def new_folder() -> Path:
    """A new folder for a run for which the user names none."""
    return home() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
