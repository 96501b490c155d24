"""``narrowfuzz score``: hunt every planted fault, run every control, say what was missed."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from narrowfuzz.arms.ladder import select_arms
from narrowfuzz.campaign.supervisor import Tally, interruptible, start_server
from narrowfuzz.device import asked_here, check_device, choose, default_workers
from narrowfuzz.environment import prepare, versions
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import builtin_controls, builtin_faults, load_plants
from narrowfuzz.recipe import Recipe, load_every, obstacle
from narrowfuzz.score.controls import run_control
from narrowfuzz.score.hunt import Options, Target, hunt, record
from narrowfuzz.score.record import (
    Change,
    Controlled,
    Hunted,
    Score,
    compare,
    false_alarms,
    load_score,
    to_json,
)
from narrowfuzz.score.report import IDLE, print_control, print_fault, print_summary, summary_json
from narrowfuzz.stateful import Stateful, process_of

T = TypeVar("T")
R = TypeVar("R")
#: A fault that only a compiled rung shows is hunted this many times longer.
COMPILED_TIMES = 10.0


@dataclass(frozen=True)
class Asked:
    """What ``narrowfuzz score`` was asked for."""

    faults: tuple[Path, ...] = ()
    only: tuple[str, ...] = ()
    builtin: bool = True
    controls: bool = True
    seconds: float = 60.0
    cases: int = 0
    control_cases: int = 500
    workers: int = 0
    seed: int = 0
    arms: tuple[str, ...] = ()
    device: str = "cpu"
    out: Path | None = None
    against: Path | None = None


def score_command(asked: Asked) -> int:
    """Returns the exit code: 1 for lost recall or a false alarm, 2 for faults that could not be
    hunted, else 0. Raises ValueError for what cannot be asked for."""
    _check(asked)
    before = load_score(asked.against) if asked.against else None
    prepare()
    faults, problems = _faults(asked)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    targets, unfit = _targets(faults, asked.device)
    for named in unfit:
        print_fault(console, named)
    controls = _controls(asked)
    if not faults and not controls and not problems:
        raise ValueError(f"--only {' '.join(asked.only)} matches no fault and no control")
    options = Options(
        seconds=asked.seconds,
        compiled_seconds=asked.seconds * COMPILED_TIMES,
        seed=asked.seed,
        cases=asked.cases,
        arms=asked.arms,
        device=asked.device,
    )
    workers = asked.workers or default_workers(asked.device)
    tallies: list[Tally] = []
    choose(asked.device)  # once, not in every hunt
    start_server(asked.device)
    with interruptible(tallies):
        hunted = _side_by_side(
            targets, workers, tallies, lambda q, t: hunt(q, options, t),
            lambda done: print_fault(console, done),
        )  # fmt: skip
        quiet = _side_by_side(
            controls, workers, tallies,
            lambda control, tally: _controlled(control, asked, tally),
            lambda done: print_control(console, done),
        )  # fmt: skip
    interrupted = any(tally.interrupted for tally in tallies)
    score = Score(
        versions=versions(),
        seed=asked.seed,
        seconds=options.seconds,
        compiled_seconds=options.compiled_seconds,
        faults=(*hunted, *unfit),
        controls=tuple(quiet),
        problems=tuple(problems),
    )
    change = compare(before, score) if before else None
    print_summary(console, score, change)
    if asked.out is not None:
        asked.out.write_bytes(to_json(score, summary_json(score)))
    return 130 if interrupted else _code(score, change)


def _check(asked: Asked) -> None:
    check_device(asked.device)
    if not asked.builtin and not asked.faults and not asked.controls:
        raise ValueError("--no-builtin and --no-controls without --faults leave nothing to do")
    if not 0 < asked.seconds <= 86_400:
        raise ValueError(f"--seconds must be above 0 and at most a day, got {asked.seconds:g}")
    if asked.cases < 0 or asked.control_cases < 1:
        raise ValueError("--cases must be at least 0 and --control-cases at least 1")
    select_arms(asked.arms)
    if asked.out is not None and not asked.out.parent.is_dir():
        raise ValueError(f"--json {asked.out}: there is no folder {asked.out.parent}")


def _faults(asked: Asked) -> tuple[list[tuple[str, Plant]], list[str]]:
    """(file, fault) of all that is asked for, and what is wrong with fault files."""
    shipped = builtin_faults() if asked.builtin else {}
    found = [("", f) for f in shipped.values()]
    problems: list[str] = []
    for file in (named.resolve() for named in asked.faults):
        try:
            found += [(str(file), fault) for fault in load_plants(file).values()]
        except ValueError as error:
            problems.append(str(error))
    return [(file, fault) for file, fault in found if _asked_for(fault.id, asked.only)], problems


def _controls(asked: Asked) -> list[Plant]:
    if not asked.controls:
        return []
    return [c for c in builtin_controls().values() if _asked_for(c.id, asked.only)]


def _controlled(control: Plant, asked: Asked, tally: Tally) -> Controlled:
    try:
        result = run_control(
            control, asked.control_cases, asked.seed, device=asked.device, tally=tally
        )
    except (RuntimeError, ValueError) as error:  # it broke, or cannot run here: that is told
        return Controlled(
            id=control.id, title=control.title, cases=0, seconds=0.0, problem=str(error)
        )
    few = f"only {result.cases} of {asked.control_cases} cases"
    notes = [*result.notes, *([few] if result.cases < asked.control_cases else [])]
    return Controlled(
        id=control.id,
        title=control.title,
        cases=result.cases,
        seconds=round(result.seconds, 1),
        findings=result.findings,
        suspected=result.suspected,
        problem="; ".join(notes),
    )


def _asked_for(name: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatch.fnmatch(name, glob) for glob in globs)


def _targets(faults: Sequence[tuple[str, Plant]], device: str) -> tuple[list[Target], list[Hunted]]:
    """With the recipes that run here, and the faults that can hit none of them."""
    known = load_every()
    reasons: dict[tuple[str, str], str] = {}
    targets, unfit = [], []
    for file, fault in faults:
        named = [name for name in sorted(known) if _hits(fault.recipes, name, known[name])]
        where = asked_here(fault.device or device)
        for name in named:  # only what is hunted on is fetched
            if (name, where) not in reasons:
                reasons[name, where] = obstacle(known[name], where)
        able = tuple(name for name in named if not reasons[name, where])
        if able:
            targets.append(Target(fault, file, able))
        else:
            why = "; ".join(f"{name}: {reasons[name, where]}" for name in named) or "there is none"
            recipes = ", ".join(fault.recipes)
            unfit.append(record(fault, found=False, problem=f"no recipe {recipes} runs: {why}"))
    return targets, unfit


def _hits(globs: Sequence[str], name: str, recipe: Recipe | Stateful) -> bool:
    """A recipe that patches a library takes part only where it is meant."""
    meant = [glob for glob in globs if glob != "*"] if process_of(recipe) else globs
    return any(fnmatch.fnmatch(name, glob) for glob in meant)


def _side_by_side(
    work: Sequence[T],
    workers: int,
    tallies: list[Tally],
    one: Callable[[T, Tally], R],
    done: Callable[[R], None],
) -> list[R]:
    """Each piece of work with a tally of its own, so many at a time, in the order given; what an
    interruption cuts short says nothing and is left out."""
    waiting = [(piece, Tally()) for piece in work]
    tallies += [tally for _, tally in waiting]

    def run(piece: T, tally: Tally) -> R | None:
        if tally.interrupted:
            return None
        tally.started = time.monotonic()
        result = one(piece, tally)
        if tally.interrupted:
            return None
        done(result)
        return result

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(run, *item) for item in waiting]
        results = [future.result() for future in running]
    return [result for result in results if result is not None]


def _code(score: Score, change: Change | None) -> int:
    if false_alarms(score.controls) or (change and change.lost):
        return 1
    shipped = builtin_faults()
    unusable = [
        f"{f.id}: {f.problem or IDLE}"
        for f in score.faults
        if f.problem or (f.idle and f.id not in shipped)  # ours are shown to plant something
    ]
    silent = [f"control {c.id}: {c.problem}" for c in score.controls if c.problem]
    wrong = [*score.problems, *unusable, *silent]
    for sentence in wrong:
        print(f"narrowfuzz: {sentence}", file=sys.stderr)
    return 2 if wrong else 0
