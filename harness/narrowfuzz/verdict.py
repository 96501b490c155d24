"""What a rule says about a case, and how verdicts become findings' identities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Status = Literal[
    "ok", "diverged", "crashed", "hung", "unsupported", "inconclusive", "not_applicable", "known"
]
Strength = Literal["exact", "bound", "ratio"]
#: Role of a verdict that says which as-built deviation the reference followed.
FOLLOWED = "followed"
#: Statuses that are claims against the library under test.
BAD: frozenset[Status] = frozenset({"diverged", "crashed", "hung"})


@dataclass(frozen=True)
class Verdict:
    """One rule on one arm and role."""

    oracle: str
    arm: str
    role: str
    status: Status
    #: Class of symptom, part of the fingerprint: no shapes, no values.
    symptom: str = ""
    #: Sentence pieces for people: which element, what came, what was allowed, how far off.
    where: str = ""
    measured: str = ""
    allowed: str = ""
    factor: float = 0.0
    #: Canonical operand side and flat index of the first bad element, for the repro script.
    side: str = ""
    index: tuple[int, ...] = ()
    lo: float = 0.0
    hi: float = 0.0
    #: Ledger entry or deviation that explains a ``known``.
    explained_by: str = ""
    #: The layer of a model it was judged at; "" for a single linear or the model as a whole.
    layer: str = ""
    #: True: at that layer's last call of several, not at its first.
    last_call: bool = False

    def known(self, by: str) -> Verdict:
        """This divergence, explained."""
        return replace(self, status="known", explained_by=by)

    def sentence(self) -> str:
        """One line: what, where, how far."""
        far = f"; {self.factor:.3g}x the allowed radius" if self.factor else ""
        at = f" at {self.where}" if self.where else ""
        allowed = f", must be {self.allowed}" if self.allowed else ""
        role = f"{self.layer} {self.role}" if self.layer else self.role
        what = self.symptom if self.symptom.startswith(self.role) else f"{role} {self.symptom}"
        return f"{what}{at}: got {self.measured}{allowed}{far}"


def fingerprint(verdict: Verdict, family: str) -> str:
    """Identity of a cause: oracle, role, guilty rung, class of symptom, recipe family.

    Quantiser rules judge operands, and the same cast serves all three GEMMs: their role is the
    operand, so one wrong cast is one finding. A compiled rung is named without its checkpointing,
    unless the rule is about recomputing: most causes do not care.
    """
    arm = verdict.arm
    if not arm.startswith("eager") and verdict.oracle not in ("O12", "O13", "O18"):
        arm = arm.split("+")[0]
    role = "operand" if verdict.oracle in ("O2", "O3", "O4") else verdict.role
    return "--".join((verdict.oracle, role, arm, verdict.symptom or "value", family))
