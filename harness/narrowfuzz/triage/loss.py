"""Investigates a lost worker: runs its case in separate processes to see whether it ends or hangs
them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from narrowfuzz.case.ladder import climb
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.ledger.severity import weighed
from narrowfuzz.machine.device import torch_name
from narrowfuzz.recipe.recipe import Recipe, load_every
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Runs
from narrowfuzz.trace.verdict import Status, Verdict, fingerprint
from narrowfuzz.triage.finding import Triaged, reach_of
from narrowfuzz.triage.forms import form_of
from narrowfuzz.triage.minimise import Minimised, minimise
from narrowfuzz.triage.needs import needs_of
from narrowfuzz.triage.triage import finding_of
from narrowfuzz.triage.verify import ScriptRun, run_script

_SECONDS = 90.0
#: A compile may take a minute or two on a busy machine; a single case that takes longer hangs.
_HANG = 240.0


def triage_loss(
    case: Case,
    how: str,
    recipe_files: tuple[Path, ...],
    plant: tuple[str, str] | None,
    device: str = "cpu",
) -> Triaged:
    """The finding behind a lost worker. It is only suspected if no fresh process is lost on that
    case, or if one is lost without the planted fault as well. ``how`` is how the worker was lost;
    "hangs" for one that did not answer."""
    recipe = _recipe(case, recipe_files)
    hangs = how == "hangs"

    def run(candidate: Case, arm: str, plant: tuple[str, str] | None = plant) -> ScriptRun:
        with tempfile.TemporaryDirectory(prefix="narrowfuzz-") as folder:
            path = Path(folder) / "repro.py"
            path.write_text(_script(candidate, _verdict(arm, how), recipe, device))
            timeout = _HANG if hangs else 60.0
            return run_script(path, timeout=timeout, plant=plant, device=device)

    def lost(result: ScriptRun) -> bool:
        return result.code is None if hangs else result.crashed

    guilty, why = next((arm for arm in _arms(case.spec) if lost(run(case, arm))), ""), ""
    small = Minimised(case)
    if guilty:
        small = minimise(case, lambda c: lost(run(c, guilty)), builds=8, seconds=_SECONDS)
        if plant is not None and lost(run(small.case, guilty, None)):
            why = "the case also ends a process in which nothing is injected"
    else:
        why = "the case does not end a fresh process"
    verdict = _verdict(guilty or _arms(case.spec)[0], how)
    return _triaged(case, small, verdict, why, recipe, device)


def untried_loss(
    case: Case, how: str, recipe_files: tuple[Path, ...], device: str = "cpu"
) -> Triaged:
    """The suspected finding behind a lost worker whose case was not tried in a fresh process."""
    why = "the run ended before the case was tried in a fresh process"
    verdict = _verdict(_arms(case.spec)[0], how)
    return _triaged(case, Minimised(case), verdict, why, _recipe(case, recipe_files), device)


def names_of_loss(case: Case, how: str, recipe_files: tuple[Path, ...]) -> set[str]:
    """The fingerprints that the finding may have: one for each rung that may be guilty."""
    family = _recipe(case, recipe_files).family
    return {fingerprint(_verdict(arm, how), family) for arm in _arms(case.spec)}


def _recipe(case: Case, recipe_files: tuple[Path, ...]) -> Recipe:
    return load_every(recipe_files, [case.spec.recipe])[case.spec.recipe]


def _verdict(arm: str, how: str) -> Verdict:
    status: Status = "hung" if how == "hangs" else "crashed"
    return Verdict("contract", arm, "forward", status, how, At(what="error"), how, Runs())


def _triaged(
    case: Case,
    small: Minimised,
    verdict: Verdict,
    why: str,
    recipe: Recipe,
    device: str,
) -> Triaged:
    """The finding; it is only suspected if ``why`` gives a reason."""
    weight = weighed("loud", 0.0, reach_of(small.case))
    finding = msgspec.structs.replace(
        finding_of(verdict, case, small.case, recipe, {"name": device}),
        severity=weight.severity,
        why_severity=weight.why,
        flake="flaky" if why else "always",
        attempts=small.attempts,
        untried=small.untried,
        script_output=verdict.symptom,
        why_suspected=why,
        # the fields of a case that was not minimised are not all conditions of the loss
        needs=needs_of(small.case, verdict) if small.attempts else [],
    )
    return Triaged(finding, _script(small.case, verdict, recipe, device))


def _arms(spec: Spec) -> list[str]:
    return [arm.name for arm in climb(spec)]


def _script(case: Case, verdict: Verdict, recipe: Recipe, device: str) -> str:
    return form_of(case.spec).lost(case, verdict, recipe, torch_name(device))
