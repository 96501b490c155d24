"""Turn a first cause into a finding: repeat it, minimise it, write its script, verify the script."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness.arms.ladder import BY_NAME as ARMS
from harness.case import Case
from harness.environment import describe
from harness.judge import Judge
from harness.oracles import BY_NAME, ORACLES
from harness.oracles.oracle import Oracle
from harness.triage.finding import Finding, Flake, reach_of, severity_of
from harness.triage.minimise import minimise
from harness.triage.script import write_script
from harness.triage.verify import run_script
from harness.verdict import Verdict, fingerprint

_BUILDS = 14


@dataclass(frozen=True)
class Triaged:
    """A finding, its script, and whether the script shows it in a fresh process."""

    finding: Finding
    script: str
    confirmed: bool


def triage(
    judge: Judge,
    case: Case,
    verdict: Verdict,
    *,
    seconds: float = 40.0,
    plant: tuple[str, str] | None = None,
) -> Triaged:
    """Everything that happens before a divergence may be called a finding."""
    recipe = judge.recipe(case.spec)
    wanted = fingerprint(verdict, recipe.family)
    oracles = needed(verdict.oracle)

    def shows(candidate: Case) -> bool:
        return judge.judge(candidate, oracles).cause(wanted) is not None

    repeats = shows(case)
    compiled = bool(ARMS[verdict.arm].compiler)
    small = minimise(case, shows, builds=_BUILDS if compiled else 0, seconds=seconds)
    final = judge.judge(small.case, oracles).cause(wanted) or verdict
    shown_again = final is not verdict or repeats
    minimal = small.case if final is not verdict else case
    try:
        script = write_script(minimal, final, recipe)
        run = _run(script, plant)
        confirmed, output = run.shown or run.crashed, run.output
    except ValueError as error:
        script, confirmed, output = f"# no stand-alone script: {error}\n", False, str(error)
    flake: Flake = "always" if shown_again and confirmed else "flaky"
    if shown_again and not confirmed:
        flake = "not shown by its script"
    elif confirmed and not shown_again:
        flake = "per process"
    finding = Finding(
        id=minimal.id,
        fingerprint=wanted,
        severity=severity_of(final, minimal),
        recipe=case.spec.recipe,
        oracle=final.oracle,
        arm=final.arm,
        role=final.role,
        symptom=final.symptom,
        sentence=final.sentence(),
        strength=BY_NAME[final.oracle].strength,
        reach=reach_of(minimal),
        case=case,
        minimal=minimal,
        flake=flake,
        attempts=small.attempts,
        untried=small.untried,
        script_output=output,
        environment=describe(),
    )
    return Triaged(finding, script, confirmed)


def needed(name: str) -> tuple[Oracle, ...]:
    """The rule itself and all that could explain it: fewer reruns per attempt, same folding."""
    upstream = BY_NAME[name].upstream
    return tuple(o for o in ORACLES if o.name == name or o.name in upstream or o.name == "contract")


def _run(script: str, plant: tuple[str, str] | None):  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as folder:
        path = Path(folder) / "repro.py"
        path.write_text(script)
        return run_script(path, plant=plant)
