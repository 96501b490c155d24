"""Turn a first cause into a finding: repeat, minimise, write its script, verify the script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from narrowfuzz.arm import BY_NAME as ARMS
from narrowfuzz.case import Case, Dtype, Spec, Spike
from narrowfuzz.environment import describe
from narrowfuzz.judge import Judge, tensors_of
from narrowfuzz.numerics.plan import OPERANDS, Role
from narrowfuzz.numerics.reference import canonical_operands
from narrowfuzz.oracles import OF_CONVERTED, rules_of
from narrowfuzz.oracles.oracle import Oracle
from narrowfuzz.oracles.schedule_evidence import LibraryEvidence
from narrowfuzz.triage.effect import effect_of
from narrowfuzz.triage.finding import (
    Finding,
    Flake,
    Story,
    Triaged,
    finding_id,
    reach_of,
    severity_of,
)
from narrowfuzz.triage.history import histories
from narrowfuzz.triage.minimise import Minimised, minimise
from narrowfuzz.triage.needs import needs_of
from narrowfuzz.triage.prove import Proof, proven, unseen
from narrowfuzz.triage.story import tell
from narrowfuzz.triage.verify import RunScript, run_script
from narrowfuzz.verdict import Verdict, fingerprint

_BUILDS = 14
#: A divergence that leaves its bound this many times over need not stay wider when it is minimised.
_MARGIN = 8.0
#: So often a case that shows nothing again is run twice; what then differs gets so many seconds.
_REPEATS, _SHORT = 20, 10.0
#: Rules about one operand of one GEMM.
OPERAND_RULES = ("O2", "O3", "O4")


def triage(
    judge: Judge,
    case: Case,
    verdict: Verdict,
    *,
    seconds: float = 40.0,
    plant: tuple[str, str] | None = None,
    scripts: RunScript = run_script,
    past: Sequence[Case] = (),
    files: Sequence[Path] = (),
) -> Triaged:
    """Everything that happens before a divergence may be called a finding. Where no script shows it
    and the case does not repeat itself, that is the finding, and the divergence is a part of it.

    ``plant``: what is planted, so that its script must show it with that and not without. ``past``:
    what ran before in this process, with the recipe ``files`` that it knows.
    """
    confirm = partial(proven, judge, plant=plant, scripts=scripts)
    shown = _minimised(judge, case, verdict, confirm, seconds)
    if not unseen(shown.proof.why):
        return _triaged(judge, shown)
    if (chance := _differs_on_repeat(judge, case, verdict)) is not None:
        instead = _triaged(judge, _minimised(judge, *chance, confirm, min(seconds, _SHORT)))
        if instead.confirmed:
            other = _triaged(judge, shown).finding
            seen_as = [f"{other.fingerprint}: {other.sentence}"]
            return replace(
                instead, finding=msgspec.structs.replace(instead.finding, seen_as=seen_as)
            )
    if past:
        names = [oracle.name for oracle in _rules(shown.case, verdict)]
        for longer, there in histories(
            judge, shown.minimal, shown.verdict, past, scripts,
            rules=names, plant=plant, files=files, seconds=seconds,
        ):  # fmt: skip
            proof = confirm(longer, there)
            shown = replace(shown, minimal=longer, verdict=there, proof=proof)
            if not proof.why:
                break
    return _triaged(judge, shown)


@dataclass(frozen=True)
class _Shown:
    """A divergence of ``case``, minimised, and its script."""

    case: Case
    minimal: Case
    verdict: Verdict
    small: Minimised
    proof: Proof
    #: The process that saw it saw it again.
    again: bool


def _differs_on_repeat(judge: Judge, case: Case, verdict: Verdict) -> tuple[Case, Verdict] | None:
    """What strikes by chance breaks any rule that compares: does the case itself, or the same in
    fp32, run again and again, not always give the same?"""
    if verdict.oracle == "O1" or case.spec.layer or ARMS[verdict.arm].compiler:
        return None
    plain = _only_as_dear(case, verdict.arm)
    for dtype in dict.fromkeys((plain.spec.dtype, *_widest(judge, case.spec))):
        spec = msgspec.structs.replace(plain.spec, dtype=dtype)
        again = msgspec.structs.replace(plain, spec=spec)
        for _ in range(_REPEATS):
            causes = judge.judge(again, needed("O1")).causes
            if found := next((v for v in causes if v.oracle == "O1"), None):
                return again, found
    return None


def _widest(judge: Judge, spec: Spec) -> tuple[Dtype, ...]:
    """What shows the last bits of a scale that a narrower result rounds away."""
    return ("fp32",) if "fp32" in judge.recipe(spec).dtypes else ()


def _rules(case: Case, verdict: Verdict) -> tuple[Oracle, ...]:
    return needed(verdict.oracle, tuple(rules_of(case.spec).values()))


def _minimised(
    judge: Judge,
    case: Case,
    verdict: Verdict,
    confirm: Callable[[Case, Verdict], Proof],
    seconds: float,
) -> _Shown:
    wanted = fingerprint(verdict, judge.recipe(case.spec).family)
    least = min(verdict.factor / 2, _MARGIN)
    oracles = _rules(case, verdict)

    def shows(candidate: Case) -> bool:
        if not _playable(judge, candidate.spec):
            return False
        found = judge.judge(candidate, oracles).cause(wanted)
        return found is not None and found.factor >= least

    case = _only_as_dear(case, verdict.arm)
    repeats = shows(case)
    compiled = bool(ARMS[verdict.arm].compiler)
    small = minimise(
        case,
        shows,
        builds=_BUILDS if compiled else 0,
        seconds=seconds,
        hint=_hint(case, verdict, judge) if case.spec.direct else None,
    )
    final = judge.judge(small.case, oracles).cause(wanted) or verdict
    minimal = small.case if final is not verdict else case
    again = final is not verdict or repeats
    return _Shown(case, minimal, final, small, confirm(minimal, final), again)


def _triaged(judge: Judge, shown: _Shown) -> Triaged:
    proof = shown.proof
    if proof.why and not shown.again:
        why = f"it did not show again in the process that saw it; {proof.why}"
        proof = replace(proof, why=why)
    flake: Flake = "always" if shown.again else "flaky" if proof.why else "per process"
    finding = _finding(judge, shown.verdict, shown.case, shown.minimal, flake, shown.small, proof)
    return Triaged(finding, proof.script)


def _finding(
    judge: Judge,
    verdict: Verdict,
    case: Case,
    minimal: Case,
    flake: Flake,
    small: Minimised,
    proof: Proof,
) -> Finding:
    wanted, effect = (
        fingerprint(verdict, judge.recipe(case.spec).family),
        effect_of(judge, minimal, verdict),
    )
    return Finding(
        id=finding_id(wanted, minimal),
        fingerprint=wanted,
        severity=severity_of(verdict, minimal, effect),
        recipe=case.spec.recipe,
        device=judge.device.name,
        oracle=verdict.oracle,
        arm=verdict.arm,
        role=verdict.role,
        symptom=verdict.symptom,
        sentence=verdict.sentence(),
        at=verdict.at,
        got=verdict.got,
        expect=verdict.expect,
        given=verdict.given,
        strength=rules_of(case.spec)[verdict.oracle].strength,
        reach=reach_of(minimal),
        case=case,
        minimal=minimal,
        flake=flake,
        attempts=small.attempts,
        untried=small.untried,
        script_output=proof.output,
        effect=effect if math.isfinite(effect) else str(effect),
        why_suspected=proof.why,
        needs=needs_of(minimal, verdict),
        environment={**describe(), "device": judge.device.describe()},
        story=_story(judge, minimal, verdict),
    )


def _story(judge: Judge, case: Case, verdict: Verdict) -> Story | None:
    """Of a library's layers, event by event."""
    evidence = judge.observe(case)
    return tell(evidence, verdict) if isinstance(evidence, LibraryEvidence) else None


def _playable(judge: Judge, spec: Spec) -> bool:
    """Can the recipe play these events? Simpler ones may be beyond it."""
    try:
        judge.recipe(spec).check(spec)
    except ValueError:
        return False
    return True


def _only_as_dear(case: Case, arm: str) -> Case:
    """The same case without the rungs above the guilty one; of a library's layers every rung is
    cheap, and regions stand where the Spec says what is checkpointed."""
    if case.spec.layer:
        return case
    changes: dict[str, str] = {}
    changes["compile"] = ARMS[arm].compiler or "none"
    if not ARMS[arm].recomputes:
        changes["checkpoint"] = "none"
    if not ARMS[arm].native:
        changes["kernels"] = "default"
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, **changes))


def _hint(case: Case, verdict: Verdict, judge: Judge) -> Spike | None:
    """The largest element of the operand row a quantiser rule was broken in."""
    if verdict.oracle not in OPERAND_RULES or not verdict.at.index:
        return None
    role: Role = verdict.role  # type: ignore[assignment]
    tensors = tensors_of(case, judge.converting(case.spec))
    a, b = canonical_operands(role, tensors)
    row = (a if verdict.at.side == "a" else b)[verdict.at.index[0]]
    name, _ = OPERANDS[role][verdict.at.side == "b"]
    value = row[np.argmax(np.abs(row))]
    bits = f"0x{int(np.float32(value).view(np.uint32)):08x}"
    return Spike(name, 0, 0, bits)


def needed(name: str, rules: Sequence[Oracle] = OF_CONVERTED) -> tuple[Oracle, ...]:
    """The rule itself and all that could explain it: fewer reruns per attempt, same folding."""
    upstream = next(o.upstream for o in rules if o.name == name)
    return tuple(o for o in rules if o.name == name or o.name in upstream or o.name == "contract")
