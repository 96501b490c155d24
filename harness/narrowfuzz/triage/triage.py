"""Turn a first cause into a finding: repeat, minimise, write its script, verify the script."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from narrowfuzz.arms.ladder import BY_NAME as ARMS
from narrowfuzz.arms.ladder import EAGER, EAGER_NATIVE
from narrowfuzz.case import Case, Spec, Spike
from narrowfuzz.environment import describe
from narrowfuzz.judge import Judge, tensors_of
from narrowfuzz.numerics.plan import OPERANDS, Role
from narrowfuzz.numerics.reference import canonical_operands
from narrowfuzz.oracles import ORACLES, rules_of
from narrowfuzz.oracles.oracle import Oracle
from narrowfuzz.oracles.schedule import SCHEDULE_ORACLES
from narrowfuzz.schedule.carries import check_carried
from narrowfuzz.triage.effect import effect_of
from narrowfuzz.triage.finding import Finding, Flake, Triaged, finding_id, reach_of, severity_of
from narrowfuzz.triage.history import with_history
from narrowfuzz.triage.minimise import minimise
from narrowfuzz.triage.needs import needs_of
from narrowfuzz.triage.script import write_script
from narrowfuzz.triage.script_played import write_played_script
from narrowfuzz.triage.script_schedule import write_schedule_script
from narrowfuzz.triage.story import tell
from narrowfuzz.triage.verify import GONE, RunScript, ScriptRun, run_script
from narrowfuzz.verdict import Verdict, fingerprint

_BUILDS = 14
#: A divergence that leaves its bound this many times over need not stay wider when it is minimised.
_MARGIN = 8.0
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
    """Everything that happens before a divergence may be called a finding.

    ``plant``: what is planted, so that its script must show it with that and not without. ``past``:
    what ran before in this process, with the recipe ``files`` that it knows.
    """
    wanted = fingerprint(verdict, judge.family(case.spec))
    least = min(verdict.factor / 2, _MARGIN)
    rules = ORACLES if case.spec.schedule is None else SCHEDULE_ORACLES
    oracles = needed(verdict.oracle, rules)

    def shows(candidate: Case) -> bool:
        if candidate.spec.schedule is not None and not _carried(judge, candidate.spec):
            return False
        found = judge.judge(candidate, oracles).cause(wanted)
        return found is not None and found.factor >= least

    case = _only_as_dear(case, verdict.arm)
    repeats = shows(case)
    compiled = case.spec.schedule is None and bool(ARMS[verdict.arm].compiler)
    small = minimise(
        case,
        shows,
        builds=_BUILDS if compiled else 0,
        seconds=seconds,
        hint=_hint(case, verdict, judge) if case.spec.direct else None,
    )
    final = judge.judge(small.case, oracles).cause(wanted) or verdict
    shown_again = final is not verdict or repeats
    minimal = small.case if final is not verdict else case
    script, output, why = _proven(judge, minimal, final, plant, scripts)
    if why and past:
        longer = with_history(
            minimal, wanted, past, scripts, plant=plant, files=files, seconds=seconds
        )
        if longer is not None:
            minimal = longer
            script, output, why = _proven(judge, minimal, final, plant, scripts)
    confirmed = not why
    if not confirmed and not shown_again:
        why = f"it did not show again in the process that saw it; {why}"
    flake: Flake = "always" if shown_again else "per process" if confirmed else "flaky"
    effect = effect_of(judge, minimal, final)
    finding = Finding(
        id=finding_id(wanted, minimal),
        fingerprint=wanted,
        severity=severity_of(final, minimal, effect),
        recipe=case.spec.recipe,
        oracle=final.oracle,
        arm=final.arm,
        role=final.role,
        symptom=final.symptom,
        sentence=final.sentence(),
        at=final.at,
        got=final.got,
        expect=final.expect,
        given=final.given,
        strength=rules_of(case.spec)[final.oracle].strength,
        reach=reach_of(minimal),
        case=case,
        minimal=minimal,
        flake=flake,
        attempts=small.attempts,
        untried=small.untried,
        script_output=output,
        effect=effect if math.isfinite(effect) else str(effect),
        why_suspected=why,
        needs=needs_of(minimal, final),
        environment=describe(),
        story=None if case.spec.schedule is None else tell(judge.look(minimal), final),
    )
    return Triaged(finding, script)


def _proven(
    judge: Judge, case: Case, verdict: Verdict, plant: tuple[str, str] | None, scripts: RunScript
) -> tuple[str, str, str]:
    """The first script that shows it, or the last that was tried; what it prints; why it does not
    show it, "" if it does."""
    tried: list[tuple[str, str, str]] = []
    for write in _scripts(judge, case, verdict):
        try:
            script = write()
        except ValueError as error:
            tried.append((f"# no stand-alone script: {error}\n", "", str(error)))
            continue
        tried.append((script, *_confirm(script, plant, scripts)))
        if not tried[-1][-1]:
            return tried[-1]
    # what ran says more than what was not written
    return next((one for one in tried if one[1]), tried[0])


def _carried(judge: Judge, spec: Spec) -> bool:
    """Can the recipe play this schedule? A simpler one may be beyond it."""
    assert spec.schedule is not None
    try:
        check_carried(spec.schedule, judge.stateful_recipe(spec).carries(), spec.recipe)
    except ValueError:
        return False
    return True


def _scripts(judge: Judge, case: Case, verdict: Verdict) -> Iterator[Callable[[], str]]:
    """Writers of scripts that may show it, the simplest first; each raises ValueError where it has
    none."""
    if case.spec.schedule is not None:
        stateful = judge.stateful_recipe(case.spec)
        yield lambda: write_schedule_script(judge.look(case), verdict, stateful)
        return
    at, recipe = verdict.at, judge.recipe(case.spec)
    # what was handed another tensor was not the layer's doing
    own = at.layer and (verdict.oracle != "O13" or at.side)
    plain = EAGER_NATIVE if ARMS[verdict.arm].native else EAGER
    layer = judge.layer(case, at.layer, at.call, plain) if own else None
    if layer is not None:
        alone = msgspec.structs.replace(case, spec=layer[0])
        yield partial(write_script, alone, verdict.of_linear(), recipe, layer[1])
    yield partial(write_script, case, judge.first_of(case, verdict), recipe)
    if case.spec.direct:  # the player may see what the short form does not
        yield partial(write_played_script, case, verdict, recipe, tensors_of(case, recipe))


def _only_as_dear(case: Case, arm: str) -> Case:
    """The same case without the rungs above the guilty one; of a schedule, every rung is cheap and
    regions stand where it says what is checkpointed."""
    if case.spec.schedule is not None:
        return case
    changes: dict[str, str] = {}
    stage = ARMS[arm].stage
    if not ARMS[arm].compiler:
        changes["compile"] = "none"
    elif stage.startswith("aot_eager"):
        changes["compile"] = stage
    if not ARMS[arm].checkpoint:
        changes["checkpoint"] = "none"
    if not ARMS[arm].native:
        changes["kernels"] = "default"
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, **changes))


def _hint(case: Case, verdict: Verdict, judge: Judge) -> Spike | None:
    """The largest element of the operand row a quantiser rule was broken in."""
    if verdict.oracle not in OPERAND_RULES or not verdict.at.index:
        return None
    role: Role = verdict.role  # type: ignore[assignment]
    tensors = tensors_of(case, judge.recipe(case.spec))
    a, b = canonical_operands(role, tensors)
    row = (a if verdict.at.side == "a" else b)[verdict.at.index[0]]
    name, _ = OPERANDS[role][verdict.at.side == "b"]
    value = row[np.argmax(np.abs(row))]
    bits = f"0x{int(np.float32(value).view(np.uint32)):08x}"
    return Spike(name, 0, 0, bits)


def needed(name: str, rules: Sequence[Oracle] = ORACLES) -> tuple[Oracle, ...]:
    """The rule itself and all that could explain it: fewer reruns per attempt, same folding."""
    upstream = next(o.upstream for o in rules if o.name == name)
    return tuple(o for o in rules if o.name == name or o.name in upstream or o.name == "contract")


def _confirm(script: str, plant: tuple[str, str] | None, scripts: RunScript) -> tuple[str, str]:
    """What the script prints in a fresh process, and why it does not show the divergence, "" if it
    does. With a fault planted it must not show it without."""
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as folder:
        path = Path(folder) / "repro.py"
        path.write_text(script)
        with ThreadPoolExecutor(2) as pool:
            clean = pool.submit(scripts, path) if plant else None
            run = scripts(path, plant=plant)
            if not (run.shown or run.crashed):
                return run.output, _why_not(run)
            if clean is not None and clean.result().code != GONE:
                output = f"{run.output}\nwithout the fault: {clean.result().output}"
                return output, "its script does not pass without what is planted"
    return run.output, ""


def _why_not(run: ScriptRun) -> str:
    last = (run.output.strip().splitlines() or ["it printed nothing"])[-1][:200]
    if run.code == GONE:
        return f"its script passes in a fresh process: {last}"
    if run.code is None:
        return last
    return f"its script cannot tell (exit code {run.code}): {last}"
