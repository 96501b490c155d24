"""Which case a worker runs, on which arm, and since when: written by it, read if that is long."""

from __future__ import annotations

import time
from pathlib import Path

from narrowfuzz.case.arm import BY_NAME
from narrowfuzz.case.spec import load_case

#: Seconds after which a case is named.
_LONG = 2.0


def note_arm(journal: Path, name: str) -> None:
    """The arm that the journalled case is run on from here on; "": none yet."""
    _file(journal).write_text(name)


def running(journal: Path) -> tuple[str, float] | None:
    """The recipe, model and arm of a journalled case that runs for long, in words, and since when
    on the monotonic clock; None while cases are short."""
    if not journal.exists():
        return None
    seconds = time.time() - journal.stat().st_mtime
    if seconds < _LONG:
        return None
    spec, file = load_case(journal.read_bytes()).spec, _file(journal)
    arm = BY_NAME.get(file.read_text() if file.exists() else "")
    how = f", {arm.words}" if arm else ""
    what = f"{spec.recipe} {spec.model.partition('#')[0]}{how}"
    return what, time.monotonic() - seconds


def _file(journal: Path) -> Path:
    return journal.with_suffix(".arm")
