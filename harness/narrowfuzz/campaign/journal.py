"""Which case a worker runs, on which arm, and since when: written by it, and read where it ends or
takes long."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, dump_case, load_case

#: Seconds after which a case is named.
_LONG = 2.0


@dataclass(frozen=True)
class Journal:
    """Of one worker's place, whichever process has it."""

    file: Path

    @classmethod
    def of(cls, out: Path, number: int) -> Journal:
        """In the folder of a run."""
        return cls(out / "journal" / f"{number}.json")

    @property
    def _arm(self) -> Path:
        return self.file.with_suffix(".arm")

    def begin(self, case: Case) -> None:
        """This case runs from here on. Whoever reads it never sees half of it."""
        begun = self.file.with_suffix(".begun")
        begun.write_bytes(dump_case(case))
        begun.replace(self.file)
        self.note_arm("")

    def note_arm(self, name: str) -> None:
        """The case is run on this arm from here on; "": none yet."""
        self._arm.write_text(name)

    @property
    def case(self) -> Case | None:
        """What was begun last; None before the first."""
        return load_case(self.file.read_bytes()) if self.file.exists() else None

    @property
    def silent(self) -> float:
        """Seconds since it was begun."""
        return time.time() - self.file.stat().st_mtime if self.file.exists() else 0.0

    def running(self) -> tuple[str, float] | None:
        """The recipe, model and arm of a case that runs for long, in words, and since when on the
        monotonic clock; None while cases are short."""
        seconds = self.silent
        if seconds < _LONG or (case := self.case) is None:
            return None
        arm = BY_NAME.get(self._arm.read_text() if self._arm.exists() else "")
        how = f", {arm.words}" if arm else ""
        what = f"{case.spec.recipe} {case.spec.model.partition('#')[0]}{how}"
        return what, time.monotonic() - seconds

    def lose(self, case: Case) -> Path:
        """Keep the case that ended its worker; where it is then."""
        return self.file.rename(self.file.with_name(f"lost-{case.id}.json"))

    def __str__(self) -> str:
        """How far it is, in words."""
        if (case := self.case) is None:
            return "before its first case"
        return f"on or after case {case.id} ({case.spec.recipe}, {case.spec.model}), {self.file}"
