"""Which case a worker runs, on which arm, and since when: written by the worker, and read by the
supervisor when the worker ends or takes long."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, dump_case, load_case

#: Seconds after which a running case is named.
_LONG = 2.0
#: How often a file is read anew if another process was writing it.
_TRIES = 5


@dataclass(frozen=True)
class Journal:
    """The journal of one worker's place, whichever process has the place."""

    file: Path

    @classmethod
    def of(cls, out: Path, number: int) -> Journal:
        """The journal of the worker with this number, in the folder of a run."""
        return cls(out / "journal" / f"{number}.json")

    @property
    def arm(self) -> Path:
        """The file that names the arm."""
        return self.file.with_suffix(".arm")

    @property
    def case(self) -> Case | None:
        """The case that was begun last; None before the first."""
        for _ in range(_TRIES):
            text = self.file.read_bytes() if self.file.exists() else b""
            if not text.strip():
                return None
            try:
                return load_case(text)
            except ValueError:  # it is half written
                time.sleep(0.01)
        return load_case(text)

    @property
    def silent(self) -> float:
        """Seconds since the file was written or touched last; 0 before the first case."""
        begun = self.file.stat() if self.file.exists() else None
        return time.time() - begun.st_mtime if begun and begun.st_size else 0.0

    def running(self) -> tuple[str, float] | None:
        """The recipe, model and arm of a case that runs for long, in words, and since when on the
        monotonic clock; None while cases are short."""
        seconds = self.silent
        if seconds < _LONG or (case := self.case) is None:
            return None
        arm = BY_NAME.get(self.arm.read_text().strip() if self.arm.exists() else "")
        how = f", {arm.words}" if arm else ""
        what = f"{case.spec.recipe} {case.spec.model.partition('#')[0]}{how}"
        return what, time.monotonic() - seconds

    def lose(self, case: Case) -> Path:
        """Set aside the case that ended its worker; returns the file that now holds it."""
        return self.file.rename(self.file.with_name(f"lost-{case.id}.json"))

    def __str__(self) -> str:
        """How far the worker has come, in words."""
        if (case := self.case) is None:
            return "no case begun"
        return f"last case begun: {case.id} ({case.spec.recipe}, {case.spec.model}), {self.file}"


class Writing:
    """Writes the journal. Its files stay open: where file systems are slow, opening a file takes as
    long as a small case."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._case, self._arm = _Line(journal.file), _Line(journal.arm)

    def begin(self, case: Case) -> None:
        """Record that this case runs from here on."""
        self._case.write(dump_case(case))
        self.note_arm("")

    def note_arm(self, name: str) -> None:
        """Record that the case runs on this arm from here on; "": on none yet."""
        self._arm.write(name.encode())


class _Line:
    """A file of one line that is overwritten; a shorter line is padded with blanks."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        self.length = os.fstat(self.descriptor).st_size

    def write(self, text: bytes) -> None:
        self.length = max(self.length, len(text))
        os.pwrite(self.descriptor, text.ljust(self.length), 0)
