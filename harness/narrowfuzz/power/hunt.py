"""Campaigns with something planted: faults, which should be found, and controls (subjects without a
bug), on which nothing may be found."""

from __future__ import annotations

import fnmatch
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec

from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.supervisor import play
from narrowfuzz.case.arm import COMPILERS, EAGER, EAGER_NATIVE
from narrowfuzz.case.features import FEATURES
from narrowfuzz.case.spec import Checkpoint, ModelName, dump_case
from narrowfuzz.machine.device import check_device, torch_name_before_begin
from narrowfuzz.plants.plant import Plant
from narrowfuzz.power.effect import LIFTED, Tried, effect
from narrowfuzz.power.miss import miss_of
from narrowfuzz.power.record import Controlled, Hunted
from narrowfuzz.recipe.recipe import Recipe, load_every, obstacle
from narrowfuzz.report.store import Store
from narrowfuzz.report.summary import pairs_seen
from narrowfuzz.report.tally import Tally
from narrowfuzz.triage.finding import OUT_OF_TIME
from narrowfuzz.triage.forms import form_of

#: A fault that only a compiled rung shows is hunted this many times longer.
COMPILED_TIMES = 10.0
#: Of a control: draws of each Spec, draws of each compiled Spec, and minutes. It has few cases,
#: which should cover as many Specs as fit into that time; controls with more cases get more time.
_DRAWS, _COMPILED_DRAWS, _MINUTES = 8, 100, 30.0
#: What all controls together should have run.
_TO_MEET = {
    "model": get_args(ModelName),
    "rung": (EAGER.name, EAGER_NATIVE.name, *COMPILERS),
    "checkpoint": get_args(Checkpoint),
    "schedule": tuple(FEATURES),
}


@dataclass(frozen=True)
class Limits:
    """The budgets of a hunt and of a control, and the seed and arms of their cases."""

    seconds: float = 60.0
    #: The most cases of a hunt; 0: as many as fit into the time.
    cases: int = 0
    control_cases: int = 500
    seed: int = 0
    arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A plant, the file that defines it ("" if it is built in), the device, and the recipes that it
    affects and that run there; ``problem`` is the reason if none does."""

    plant: Plant
    file: str
    device: str
    recipes: tuple[str, ...]
    problem: str = ""


def targets(plants: Iterable[tuple[str, Plant]], device: str) -> list[Target]:
    """A target for each (file, plant), on this device unless the plant names one. What recipes need
    is fetched only for recipes that a plant can hit."""
    known = cache(load_every)

    @cache
    def reason(files: tuple[Path, ...], name: str, where: str) -> str:
        return obstacle(known(files)[name], where)

    found = []
    for file, plant in plants:
        where = plant.device or device
        try:
            check_device(where)
            every = known(plant.recipe_files)
            reasons = {
                name: reason(plant.recipe_files, name, torch_name_before_begin(where))
                for name in sorted(every)
                if _hits(plant.recipes, name, every[name])
            }
            able = tuple(name for name, why in reasons.items() if not why)
            why = "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "there is none"
            problem = "" if able else f"no recipe {', '.join(plant.recipes)} runs: {why}"
        except ValueError as error:
            able, problem = (), str(error)
        found.append(Target(plant, file, where, able, problem))
    return found


def _hits(globs: Sequence[str], name: str, recipe: Recipe) -> bool:
    """True if one of the globs matches the recipe; the glob "*" does not match recipes that patch a
    library."""
    meant = [glob for glob in globs if glob != "*"] if recipe.process else globs
    return any(fnmatch.fnmatch(name, glob) for glob in meant)


@contextmanager
def _campaign(target: Target, limits: Limits, tally: Tally, **how: Any) -> Iterator[Store]:
    """Run an ordinary campaign with the target planted; its store exists only in the context."""
    plant = target.plant
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-score-") as folder:
        config = Config(
            out=Path(folder),
            workers=1,
            seed=limits.seed,
            recipes=target.recipes,
            recipe_files=plant.recipe_files,
            plant=(target.file, plant.id),
            models=plant.models,
            linears=not plant.models or "linear" in plant.models,
            device=target.device,
            wild_shapes=plant.wild_shapes,
            **how,
        )
        store = Store(Path(folder))
        play(config, store, lambda tally: None, tally)
        yield store


def hunt(target: Target, limits: Limits, tally: Tally) -> Hunted:
    """Run a campaign until the first verified finding or the limit. ``tally`` is this hunt's."""
    fault = target.plant

    def record(**more: Any) -> Hunted:
        return Hunted(
            id=fault.id,
            family=fault.family,
            title=fault.title,
            link=fault.source,
            compiled=fault.compiled,
            ours=in_our_reference(fault.recipes),
            **more,
        )

    if target.problem:
        return record(found=False, problem=target.problem)
    tried = Tried(
        target.file,
        fault.id,
        target.recipes,
        fault.recipe_files,
        target.device,
        LIFTED,
        fault.compiled,
    )
    first = effect(replace(tried, compiled=False))
    if first.problem:
        return record(found=False, problem=first.problem)
    minutes = limits.seconds * (COMPILED_TIMES if fault.compiled else 1.0) / 60.0
    arms = fault.arms or limits.arms
    with _campaign(
        target, limits, tally, minutes=minutes, arms=arms, cases=limits.cases, stop_after=1
    ) as store:
        unshown = store.suspected()
    # the first finding ends the hunt: whether scripts show the other suspected ones is unknown
    looked_into = [one for one in unshown if one.why_suspected != OUT_OF_TIME or not tally.found]
    suspected = tuple(f"{one.fingerprint}: {one.why_suspected}" for one in looked_into)
    if tally.found:
        best, spec = tally.found[0], tally.found[0].finding.minimal.spec
        return record(
            found=True,
            seconds=round(best.seconds - tally.ready, 2),
            cases=best.cases,
            rule=best.finding.rule,
            arm=best.finding.arm,
            fingerprint=best.finding.fingerprint,
            size=form_of(spec).size(spec),
            sentence=best.finding.sentence,
            suspected=suspected,
            cut_short=len(unshown) - len(looked_into),
        )
    problem, miss = "; ".join(tally.notes) if tally.broken else "", None
    if not (problem or tally.interrupted):
        miss = miss_of(tried)
    return record(
        found=False,
        cases=tally.counts["cases"],
        suspected=suspected,
        idle=miss is not None and not (miss.problem or miss.changed),
        miss=miss,
        problem=problem,
    )


def control(target: Target, limits: Limits, tally: Tally) -> Controlled:
    """Judge ``limits.control_cases`` cases of a control; every finding is a false alarm. ``tally``
    is this control's."""
    plant, wanted = target.plant, limits.control_cases
    if target.problem:
        return Controlled(
            id=plant.id, title=plant.title, cases=0, seconds=0.0, problem=target.problem
        )
    with _campaign(
        target,
        limits,
        tally,
        minutes=_MINUTES * max(1, wanted // Limits().control_cases),
        arms=plant.arms,
        cases=wanted,
        draws=_DRAWS,
        compiled_draws=_COMPILED_DRAWS,
    ) as store:
        findings, suspected = store.findings(), store.suspected()
    cases = tally.counts["cases"]
    few = [f"only {cases} of {wanted} cases"] if cases < wanted else []
    values = {value for pair in pairs_seen(tally.counts) for value in pair}
    return Controlled(
        id=plant.id,
        title=plant.title,
        cases=cases,
        seconds=round(time.monotonic() - tally.started, 1),
        findings=tuple(finding.fingerprint for finding in findings),
        suspected=tuple(finding.fingerprint for finding in suspected),
        alarms={
            finding.fingerprint: msgspec.Raw(dump_case(finding.minimal))
            for finding in (*findings, *suspected)
        },
        met=tuple(sorted(f"{kind} {name}" for kind, name in values if kind in _TO_MEET)),
        problem="; ".join([*tally.notes, *few]),
    )


def lacking(controls: Iterable[Controlled]) -> tuple[str, ...]:
    """The models, rungs, checkpoints and features of schedules that no control has run."""
    met = {what for one in controls for what in one.met}
    wanted = (f"{kind} {name}" for kind, names in _TO_MEET.items() for name in names)
    return tuple(what for what in wanted if what not in met)


def in_our_reference(recipes: Sequence[str]) -> bool:
    """True if these globs match reference recipes only."""
    return all(glob.startswith("reference.") for glob in recipes)
