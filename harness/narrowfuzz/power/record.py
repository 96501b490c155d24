"""The records of a score, their JSON (schema 1), and the comparison with an earlier score.

``docs/detection.md`` documents the fields. Fields may be added, but never renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

SCHEMA = 1


class Miss(msgspec.Struct, kw_only=True, frozen=True):
    """What cases that were drawn for this purpose show about a fault that was missed."""

    cases: int = 0
    #: Number of cases in which the fault's own code ran, and in which it changed a trace.
    ran: int = 0
    changed: int = 0
    #: Number of changed cases that a rule judged; and rule -> number of them in which it failed.
    judged: int = 0
    seen: dict[str, int] = {}
    #: Why this could not be measured; "" if it was.
    problem: str = ""

    @property
    def why(self) -> str:
        """A sentence on the first stage that no case reached: its code runs, it changes something,
        a rule judges that, a rule fails."""
        if self.problem:
            return f"why is not measured: {self.problem}"
        of = f"of {self.cases} cases drawn for that"
        if not self.ran and not self.changed:
            return f"its code ran in none {of}"
        if not self.changed:
            return f"its code ran in {self.ran} {of}, and changed nothing"
        if not self.judged:
            return f"it changed {self.changed} {of}, and no rule judged one of these"
        if not self.seen:
            return f"it changed {self.changed} {of}, and every rule was silent"
        by = ", ".join(f"{rule} in {n}" for rule, n in self.seen.items())
        return f"it changed {self.changed} {of}, and rules saw that ({by})"


class Hunted(msgspec.Struct, kw_only=True, frozen=True):
    """The result of hunting one planted fault."""

    id: str
    family: str
    title: str
    link: str
    found: bool
    #: Seconds from the first worker's being ready to the first verified finding; None without one.
    seconds: float | None = None
    #: Cases judged by then; without a finding, all cases judged.
    cases: int = 0
    rule: str = ""
    #: The arm of the finding, checkpointing included.
    arm: str = ""
    fingerprint: str = ""
    #: Number of elements of the minimal case's three tensors, or of events of a schedule.
    size: int = 0
    sentence: str = ""
    #: True if only a compiled rung can show the fault.
    compiled: bool = False
    #: True if the fault is in narrowfuzz's own reference recipes, not in a library.
    ours: bool = False
    #: Divergences whose script did not show them with the fault planted and not without it.
    suspected: tuple[str, ...] = ()
    #: Number of divergences whose script had no time to run, as a finding ended the hunt.
    cut_short: int = 0
    #: True for a missed fault that changed nothing in any drawn case.
    idle: bool = False
    #: For a missed fault: the measured reason.
    miss: Miss | None = None
    #: Why the fault could not be searched for, for example as it raises or cannot be lifted; "" if
    #: it could.
    problem: str = ""
    #: The old name of ``rule`` in JSON, until 0.2.0.
    oracle: str = ""

    def __post_init__(self) -> None:
        for name in ("rule", "oracle"):
            msgspec.structs.force_setattr(self, name, self.rule or self.oracle)


class Controlled(msgspec.Struct, kw_only=True, frozen=True):
    """The result of one control, a subject without a bug: every finding is a false alarm."""

    id: str
    title: str
    cases: int
    seconds: float
    findings: tuple[str, ...] = ()
    #: Divergences that no script reproduces; they are false alarms, too.
    suspected: tuple[str, ...] = ()
    #: Fingerprint of a false alarm -> its case, as a case file has it (``narrowfuzz replay``).
    alarms: dict[str, msgspec.Raw] = {}
    #: Models, rungs, kinds of checkpointing and features of schedules that its cases had.
    met: tuple[str, ...] = ()
    problem: str = ""


class Score(msgspec.Struct, kw_only=True, frozen=True):
    """One run of ``narrowfuzz score``."""

    schema: int = SCHEMA
    versions: dict[str, str]
    seed: int
    #: Time limit for one fault; for one that needs a compiler.
    seconds: float
    compiled_seconds: float
    faults: tuple[Hunted, ...]
    #: Limit of cases for one fault, 0 for none; and the only arms that ran, () for all.
    cases: int = 0
    arms: tuple[str, ...] = ()
    controls: tuple[Controlled, ...] = ()
    #: Files that could not be read.
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """How this score differs from an earlier one."""

    #: Faults that were found and are not any more.
    lost: tuple[str, ...]
    #: Faults that were not found and are now.
    gained: tuple[str, ...]


def compare(before: Score, now: Score) -> Change:
    """The faults that were lost and gained between two scores."""
    old = {fault.id: fault.found for fault in before.faults}
    new = {fault.id: fault.found for fault in now.faults}
    both = [name for name in new if name in old]
    return Change(
        lost=tuple(name for name in both if old[name] and not new[name]),
        gained=tuple(name for name in both if new[name] and not old[name]),
    )


def to_json(score: Score, more: dict[str, Any]) -> bytes:
    """The score as a file's content; ``more`` adds fields that are derived from it."""
    return formatted({**msgspec.structs.asdict(score), **more})


def formatted(value: Any) -> bytes:
    """Indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"


def load_score(path: Path) -> Score:
    """Read an earlier score. Raises ValueError naming the file if it is not one."""
    try:
        score = msgspec.json.decode(path.read_bytes(), type=Score)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is not a score's JSON: {error}") from None
    if score.schema != SCHEMA:
        raise ValueError(f"{path} has schema {score.schema}, this version reads {SCHEMA}")
    return score


def false_alarms(controls: Sequence[Controlled]) -> tuple[str, ...]:
    """``control: fingerprint`` of all findings on controls, reproduced or only suspected."""
    return tuple(
        f"{control.id}: {name}"
        for control in controls
        for name in (*control.findings, *control.suspected)
    )
