"""Writes a rank's records: a line of JSON for each event, and a small ring buffer of its last
collectives, which survives however the process ends. Uses the standard library only, as it runs in
the Python of the user's command."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

#: The ring's number of collectives, and the bytes of each one's line.
RING, SLOT = 256, 320
#: Collectives and parameters are recorded in each of the first ``EVERY`` steps, later only in every
#: ``THEN``-th.
EVERY, THEN = 1000, 100

_ORDINAL_LOCK = threading.Lock()
_ORDINALS: dict[int, int] = {}


class Recorder:
    """Writes the files of one thread of training: ``<pid>-<n>.jsonl`` and ``<pid>-<n>.ring``. They
    are created when there is something to write."""

    def __init__(self, folder: Path) -> None:
        with _ORDINAL_LOCK:
            ordinal = _ORDINALS[os.getpid()] = _ORDINALS.get(os.getpid(), -1) + 1
        self._stem = folder / f"{os.getpid()}-{ordinal}"
        self._lines: int | None = None
        self._ring: int | None = None
        self._slot = 0

    def write(self, kind: str, **what: Any) -> None:
        """Write one line at once, as what follows may kill the process."""
        if self._lines is None:
            self._stem.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._lines = os.open(self._stem.with_suffix(".jsonl"), flags, 0o644)
        line = {"kind": kind, "time": time.time(), **what}
        os.write(self._lines, json.dumps(line).encode() + b"\n")

    def entered(self, record: dict[str, Any]) -> int:
        """Record that a collective is entered; returns its number in the ring."""
        slot, self._slot = self._slot, self._slot + 1
        self.ring(slot, {**record, "left": False})
        return slot

    def ring(self, slot: int, record: dict[str, Any]) -> None:
        if self._ring is None:
            self._stem.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._ring = os.open(self._stem.with_suffix(".ring"), flags, 0o644)
        line = json.dumps({"slot": slot, **record}).encode()
        if len(line) > SLOT - 1:  # a group of very many ranks: its first ones identify it
            line = json.dumps({"slot": slot, **record, "group": record["group"][:8]}).encode()
        os.pwrite(self._ring, line[: SLOT - 1].ljust(SLOT - 1) + b"\n", slot % RING * SLOT)

    def close(self) -> None:
        for descriptor in (self._lines, self._ring):
            if descriptor is not None:
                os.close(descriptor)
        self._lines = self._ring = None


def kept(step: int) -> bool:
    """True if the collectives and parameters of this step are recorded."""
    return step <= EVERY or step % THEN == 0
