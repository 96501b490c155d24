"""What a score says: plain records, their JSON (schema 1), and what an earlier one says otherwise.

``docs/detection.md`` documents the fields; they are added to, never renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

SCHEMA = 1


class Miss(msgspec.Struct, kw_only=True, frozen=True):
    """What cases that were drawn for that show of a fault that was missed."""

    cases: int = 0
    #: In so many of them its own code ran, and in so many something was otherwise than without it.
    ran: int = 0
    changed: int = 0
    #: Of those that it changed, how many a rule judged; and rule -> how many it diverged in.
    judged: int = 0
    seen: dict[str, int] = {}
    #: Why that could not be measured; "" where it was.
    problem: str = ""

    @property
    def why(self) -> str:
        """The first of these that it did not come to."""
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
    """One planted fault, hunted."""

    id: str
    family: str
    title: str
    link: str
    found: bool
    #: From a worker's being ready to the first verified finding; None where there was none.
    seconds: float | None = None
    #: Cases judged by then, or in all.
    cases: int = 0
    rule: str = msgspec.field(default="", name="oracle")
    #: The guilty rung, checkpointing included.
    arm: str = ""
    fingerprint: str = ""
    #: Elements of the minimal case's three tensors; events of a schedule.
    size: int = 0
    sentence: str = ""
    #: Only a compiled rung can show it.
    compiled: bool = False
    #: It sits in our own reference, not in a library.
    ours: bool = False
    #: What was seen but not shown by its script, with the fault and not without it.
    suspected: tuple[str, ...] = ()
    #: Divergences that the hunt had no time to run a script of: what was found ended it.
    cut_short: int = 0
    #: Missed, and nothing that was drawn shows that it plants anything at all.
    idle: bool = False
    #: Missed: why, by measurement.
    miss: Miss | None = None
    #: Why it could not be hunted: it raises, or cannot be lifted.
    problem: str = ""


class Controlled(msgspec.Struct, kw_only=True, frozen=True):
    """One clean subject: every finding is a false alarm."""

    id: str
    title: str
    cases: int
    seconds: float
    findings: tuple[str, ...] = ()
    #: Divergences that no script shows: false alarms, too.
    suspected: tuple[str, ...] = ()
    #: What its cases had of the models, rungs, checkpoints and features of schedules.
    met: tuple[str, ...] = ()
    problem: str = ""


class Score(msgspec.Struct, kw_only=True, frozen=True):
    """One run of ``narrowfuzz score``."""

    schema: int = SCHEMA
    versions: dict[str, str]
    seed: int
    #: Budget of one fault; of one that needs a compiler.
    seconds: float
    compiled_seconds: float
    faults: tuple[Hunted, ...]
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
    """What was lost and won between two scores."""
    old = {fault.id: fault.found for fault in before.faults}
    new = {fault.id: fault.found for fault in now.faults}
    both = [name for name in new if name in old]
    return Change(
        lost=tuple(name for name in both if old[name] and not new[name]),
        gained=tuple(name for name in both if new[name] and not old[name]),
    )


def to_json(score: Score, more: dict[str, Any]) -> bytes:
    """The score as a file's content; ``more`` adds what is worked out from it."""
    return formatted({**msgspec.to_builtins(score), **more})


def formatted(value: Any) -> bytes:
    """JSON for people's eyes, too."""
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
    """Everything that was seen on a clean subject, scripts or not."""
    return tuple(
        f"{control.id}: {name}"
        for control in controls
        for name in (*control.findings, *control.suspected)
    )
