"""Hunt one planted fault: the ordinary campaign on the recipes it can hit, in a fresh worker."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.store import Store
from narrowfuzz.campaign.supervisor import Tally, play
from narrowfuzz.case import Case
from narrowfuzz.plants.plant import Plant
from narrowfuzz.score.observe import LIFTED, THERE, observe
from narrowfuzz.score.record import Hunted


@dataclass(frozen=True)
class Target:
    """A fault, the file it comes from ("" for a built-in one), and the recipes to hunt it on."""

    fault: Plant
    file: str
    recipes: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """How long, and with which draws."""

    seconds: float
    compiled_seconds: float
    seed: int
    #: Stop a hunt after so many cases; 0: when its time is up.
    cases: int = 0
    arms: tuple[str, ...] = ()
    device: str = "cpu"


def hunt(target: Target, options: Options, tally: Tally) -> Hunted:
    """Campaign until the first verified finding or the budget's end. ``tally`` is this hunt's."""
    fault = target.fault
    device = fault.device or options.device
    first = observe(target.file, fault.id, target.recipes, device, cases=LIFTED)
    if first.problem:
        return record(fault, found=False, problem=first.problem)
    seconds = options.compiled_seconds if fault.compiled else options.seconds
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-score-") as folder:
        config = Config(
            out=Path(folder),
            minutes=seconds / 60.0,
            workers=1,
            seed=options.seed,
            recipes=target.recipes,
            arms=options.arms,
            plant=(target.file, fault.id),
            device=device,
            wild_shapes=fault.wild_shapes,
            stop_after=1,
            cases=options.cases,
        )
        store = Store(Path(folder))
        play(config, store, lambda tally: None, tally)
        suspected = tuple(f"{f.fingerprint}: {f.why_suspected}" for f in store.suspected())
    if tally.found:
        best = tally.found[0]
        return record(
            fault,
            found=True,
            seconds=round(best.seconds - tally.ready, 2),
            cases=best.cases,
            oracle=best.finding.oracle,
            arm=best.finding.arm,
            fingerprint=best.finding.fingerprint,
            size=size_of(best.finding.minimal),
            sentence=best.finding.sentence,
            suspected=suspected,
        )
    problem, idle = "; ".join(tally.notes) if tally.broken else "", False
    if not (problem or suspected or first.changes or tally.interrupted):
        there = observe(
            target.file, fault.id, target.recipes, device, cases=THERE, compiled=fault.compiled
        )
        idle = not there.changes
    cases = tally.counts["cases"]
    return record(fault, found=False, cases=cases, suspected=suspected, idle=idle, problem=problem)


def record(fault: Plant, **found: object) -> Hunted:
    """What is known of the fault, and how its hunt went."""
    return Hunted(
        id=fault.id,
        family=fault.family,
        title=fault.title,
        link=fault.source,
        compiled=fault.compiled,
        ours=in_our_reference(fault.recipes),
        **found,  # type: ignore[arg-type]
    )


def in_our_reference(recipes: Sequence[str]) -> bool:
    """Can it hit nothing but reference recipes?"""
    return all(glob.startswith("reference.") for glob in recipes)


def size_of(case: Case) -> int:
    """Elements of input, weight and output gradient; of a schedule, its events."""
    spec = case.spec
    if spec.schedule is not None:
        return len(spec.schedule.events)
    return spec.tokens * spec.k + spec.k * spec.n + spec.tokens * spec.n
