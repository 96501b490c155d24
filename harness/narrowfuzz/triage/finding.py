"""A finding: first cause, minimal case, fingerprint, severity and what triage learnt."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from narrowfuzz.case import Case, dump_case
from narrowfuzz.schedule.events import Backward, Forward, Schedule, Stimulus
from narrowfuzz.verdict import Verdict

Severity = Literal["high", "medium", "low"]
Flake = Literal["always", "per process", "flaky", "not shown by its script"]

#: What a symptom costs a user who does not know of it.
_SYMPTOM_WEIGHT = {"contract": 2, "O1": 3, "O13": 3, "O12": 3}
_DEFAULT_WEIGHT = 3
#: Changes by a conversion that leave the step's arithmetic alone.
_CENSUS_WEIGHT = {
    "hooks lost": 2,
    "parameter hooks lost": 2,
    "attributes lost": 2,
    "attributes changed": 2,
    "parameter attributes lost": 2,
    "parameter device changed": 2,
    "state_dict keys changed": 2,
    "module type changed": 1,
    "shared module split": 1,
    "training flag changed": 1,
    "parameter type changed": 1,
    "parameter order changed": 1,
}
#: How much of that is left when only this data shows it.
_REACH_DISCOUNT = {
    "gaussian": 0,
    "zero_rows": 0,
    "outlier": 0,
    "heavy_tail": 0,
    "binade_edges": 1,
    "near_max": 1,
    "subnormal": 1,
    "inf_nan": 2,
}


class State(msgspec.Struct, frozen=True):
    """One slot after one event; what is not finite stands as text."""

    event: int
    scale: float | str
    window: list[float | str]


class Story(msgspec.Struct, kw_only=True):
    """What a stateful finding's minimal schedule did."""

    #: What is trained, then the schedule, one line an event.
    lines: list[str]
    #: The event that first broke the rule, as its number and as a line; -1 if the rule names none.
    event: int
    broke: str
    #: The slot that is followed, and its state over the events, arm by arm.
    slot: str
    states: dict[str, list[State]]


class Finding(msgspec.Struct, kw_only=True):
    """One first cause."""

    id: str
    fingerprint: str
    severity: Severity
    recipe: str
    #: Sentence pieces of the verdict.
    oracle: str
    arm: str
    role: str
    symptom: str
    sentence: str
    strength: str
    reach: str
    case: Case
    minimal: Case
    flake: Flake
    attempts: int = 0
    untried: list[str] = msgspec.field(default_factory=list)
    script_output: str = ""
    environment: dict[str, Any] = msgspec.field(default_factory=dict)
    story: Story | None = None


def finding_id(fingerprint: str, minimal: Case) -> str:
    """Short hash of what was found and where: two causes may share their smallest case."""
    return hashlib.sha256(fingerprint.encode() + dump_case(minimal)).hexdigest()[:12]


def reach_of(case: Case) -> str:
    """The tamest data class that shows it; the minimiser has already looked for a tamer one."""
    if case.spec.schedule is not None:
        return _stimulus_reach(case.spec.schedule)
    if any(_special(s.bits) for s in case.data.spikes):
        return "inf_nan"
    if case.data.regime == "lattice":
        return "gaussian"
    if case.data.spikes and case.data.values == "gaussian":
        return "binade_edges"  # one planted value: what a spike class would have to hit
    return case.data.values


#: Wildest first: what a schedule must send for the finding to show.
_STIMULUS_REACH: tuple[tuple[Stimulus, str], ...] = (
    ("inf", "inf_nan"),
    ("spike", "outlier"),
    ("zero", "zero_rows"),
)


def _stimulus_reach(schedule: Schedule) -> str:
    sent = {e.values for e in schedule.events if isinstance(e, Forward | Backward)}
    return next((reach for values, reach in _STIMULUS_REACH if values in sent), "gaussian")


def _special(bits: str) -> bool:
    return (int(bits, 16) & 0x7F800000) == 0x7F800000


def severity_of(verdict: Verdict, case: Case) -> Severity:
    """Symptom times reach."""
    weight = _SYMPTOM_WEIGHT.get(verdict.oracle, _DEFAULT_WEIGHT)
    if verdict.oracle == "contract":
        if verdict.status == "diverged" or "only under compile" in verdict.symptom:
            weight = 3
        elif verdict.symptom.startswith(("refusal names", "unclear refusal of an empty")):
            weight = 1
    elif verdict.oracle == "census":
        weight = _CENSUS_WEIGHT.get(verdict.symptom, _DEFAULT_WEIGHT)
    else:
        weight -= _REACH_DISCOUNT[reach_of(case)]
    return "high" if weight >= 3 else "medium" if weight == 2 else "low"


def report(finding: Finding) -> str:
    """What a failure says: what, where, how far, the smallest case, and the one command."""
    spec, data = finding.minimal.spec, finding.minimal.data
    shape, backend = f"M={spec.tokens} K={spec.k}", ""
    if spec.schedule is None:
        shape, backend = f"{shape} N={spec.n}", f" ({spec.backend or 'default backend'})"
    lines = [
        f"{finding.sentence}",
        f"  {spec.recipe}{backend} / {finding.arm} vs reference"
        f"   [{finding.oracle}, {finding.strength}]   severity {finding.severity}"
        f" ({finding.reach} data)",
        f"  smallest case: {shape} {spec.dtype} {data.regime} seed={data.seed}"
        f"   id {finding.id}   replay: narrowfuzz replay {finding.id}",
    ]
    if finding.story is not None:
        lines += [f"    {line}" for line in finding.story.lines]
    if finding.flake != "always":
        lines.append(f"  repeats: {finding.flake}")
    return "\n".join(lines)
