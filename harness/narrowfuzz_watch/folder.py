"""Where a run goes that is not told."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: The source tree that this would lie in: <checkout>/harness/narrowfuzz_watch.
_CHECKOUT = Path(__file__).resolve().parents[2]


def home() -> Path:
    """Where the folders of runs stand: in a checkout's reports, else below the place where the
    user is."""
    inside = (
        Path.cwd().resolve() == _CHECKOUT
        and Path("harness/narrowfuzz_watch").is_dir()
        and Path("pyproject.toml").is_file()
        and Path("recipes").is_dir()
    )
    return Path("reports/runs" if inside else "narrowfuzz-runs")


def new_folder() -> Path:
    """One of them, of a run that names no other."""
    return home() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
