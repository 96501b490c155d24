"""``narrowfuzz score``: hunt every planted fault, run every control, report what was missed."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TypeVar

from msgspec.structs import replace

from narrowfuzz.arms.available import none_runs, select_arms
from narrowfuzz.campaign.server import start_server
from narrowfuzz.campaign.supervisor import interruptible
from narrowfuzz.machine.device import check_device, choose, default_workers
from narrowfuzz.machine.environment import prepare, versions
from narrowfuzz.plants.plant import Plant
from narrowfuzz.plants.registry import builtin_faults, builtin_plants, load_plants
from narrowfuzz.power.hunt import COMPILED_TIMES, Limits, Target, control, hunt, lacking, targets
from narrowfuzz.power.record import (
    Change,
    Controlled,
    Hunted,
    Score,
    compare,
    false_alarms,
    load_score,
    to_json,
)
from narrowfuzz.power.report import (
    print_control,
    print_fault,
    print_summary,
    summary_json,
)
from narrowfuzz.report.tally import Tally
from narrowfuzz.report.terminal import console

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ScoreOptions:
    """Options of ``narrowfuzz score``."""

    #: Files that define plants.
    files: tuple[Path, ...] = ()
    only: tuple[str, ...] = ()
    builtin: bool = True
    controls: bool = True
    limits: Limits = field(default_factory=Limits)
    workers: int = 0
    device: str = "cpu"
    out: Path | None = None
    against: Path | None = None
    #: Continue an earlier run whose score is in ``out``.
    resume: bool = False


def score_command(options: ScoreOptions) -> int:
    """Hunt faults and run controls, and print and save the score. Those whose arms do not run here
    are named and left out.

    Returns the exit code: 1 for lost recall or a false alarm, 2 for faults or controls that could
    not be used, 130 if interrupted, else 0. Raises ValueError for invalid options.
    """
    _check(options)
    before = load_score(options.against) if options.against else None
    prepare()
    earlier = _earlier(options)
    plants, problems = _plants(options)
    if not plants and not problems:
        raise ValueError(f"--only {' '.join(options.only)} matches no fault and no control")
    page = console()
    lacking_here = {
        plant.id: none_runs(plant.arms, plant.device or options.device) for _, plant in plants
    }
    for id, why in lacking_here.items():
        if why:
            page.print(f"not searched for: {id}: {why}")
    plants = [item for item in plants if not lacking_here[item[1].id]]
    if not plants and not problems:
        raise ValueError("nothing of what was asked for can run here")
    order = [plant.id for _, plant in plants]
    has = {one.id for one in earlier.faults if not one.problem}
    has |= {one.id for one in earlier.controls if not one.problem}
    if has:
        page.print(f"{options.out} has {len(has)} of {len(order)}, which are not run again")
        plants = [item for item in plants if item[1].id not in has]
    limits = options.limits
    score = replace(earlier, problems=tuple(problems))
    lock = Lock()

    def run(target: Target, tally: Tally) -> Hunted | Controlled:
        return (control if target.plant.legal else hunt)(target, limits, tally)

    def tell(done: Hunted | Controlled) -> None:
        nonlocal score
        with lock:
            if isinstance(done, Hunted):
                print_fault(page, done)
            else:
                print_control(page, done)
            score = _with(score, done, order)
            if options.out is not None:
                _write(options.out, score)

    tallies: list[Tally] = []
    work = targets(plants, options.device)
    choose(options.device)  # once for all hunts
    start_server(options.device)
    with interruptible(tallies):
        workers = options.workers or default_workers(options.device)
        _side_by_side(work, workers, tallies, run, tell)
    change = compare(before, score) if before else None
    print_summary(page, score, change)
    never = lacking(score.controls) if score.controls and not options.only else ()
    if never:
        page.print(f"no control has run: {', '.join(never)}")
    if options.out is not None:
        _write(options.out, score)
    return 130 if any(tally.interrupted for tally in tallies) else _code(score, change)


def _earlier(options: ScoreOptions) -> Score:
    """The score of an earlier run to be resumed, else an empty one. Raises ValueError if the
    earlier run had other versions, another seed, other arms or other limits."""
    limits = options.limits
    nothing = Score(
        versions=versions(),
        seed=limits.seed,
        seconds=limits.seconds,
        compiled_seconds=limits.seconds * COMPILED_TIMES,
        faults=(),
        cases=limits.cases,
        arms=tuple(limits.arms),
    )
    if not options.resume or options.out is None or not options.out.exists():
        return nothing
    found = load_score(options.out)
    for name in ("versions", "seed", "seconds", "cases", "arms"):
        was, now = (
            " ".join(value) or "all" if isinstance(value, tuple) else value
            for value in (getattr(found, name), getattr(nothing, name))
        )
        if was != now:
            raise ValueError(
                f"--resume: {options.out} was measured with {name} {was}, this run has {now}: name "
                "another file with --json"
            )
    return found


def _with(score: Score, done: Hunted | Controlled, order: Sequence[str]) -> Score:
    """The score with one more result, which replaces one of the same id; sorted as in ``order``."""

    place = {id: number for number, id in enumerate(order)}
    has = score.faults if isinstance(done, Hunted) else score.controls
    every = [done, *(one for one in has if one.id != done.id)]
    every.sort(key=lambda one: place.get(one.id, len(place)))
    return replace(score, **{"faults" if isinstance(done, Hunted) else "controls": tuple(every)})


def _write(out: Path, score: Score) -> None:
    """Write the file atomically: a process killed meanwhile leaves the earlier file intact."""
    whole = out.with_name(f".{out.name}")
    whole.write_bytes(to_json(score, summary_json(score)))
    whole.replace(out)


def _check(options: ScoreOptions) -> None:
    limits = options.limits
    if options.resume and options.out is None:
        raise ValueError("--resume goes on with the file of --json, which is not given")
    check_device(options.device)
    if not options.builtin and not options.files and not options.controls:
        raise ValueError("--no-builtin and --no-controls without --faults leave nothing to do")
    if not 0 < limits.seconds <= 86_400:
        raise ValueError(f"--seconds must be above 0 and at most a day, got {limits.seconds:g}")
    if limits.cases < 0 or limits.control_cases < 1:
        raise ValueError("--cases must be at least 0 and --control-cases at least 1")
    select_arms(limits.arms)
    if options.out is not None and not options.out.parent.is_dir():
        raise ValueError(f"--json {options.out}: there is no folder {options.out.parent}")


def _plants(options: ScoreOptions) -> tuple[list[tuple[str, Plant]], list[str]]:
    """(file, plant) of all requested plants, faults first; and errors in the files of plants."""
    found = [("", p) for p in builtin_plants().values() if p.legal or options.builtin]
    problems: list[str] = []
    for file in (named.resolve() for named in options.files):
        try:
            found += [(str(file), plant) for plant in load_plants(file).values()]
        except ValueError as error:
            problems.append(str(error))
    wanted = [
        (file, plant)
        for file, plant in found
        if (options.controls or not plant.legal)
        and (not options.only or any(fnmatch.fnmatch(plant.id, glob) for glob in options.only))
    ]
    return sorted(wanted, key=lambda item: item[1].legal), problems


def _side_by_side(
    work: Sequence[T],
    workers: int,
    tallies: list[Tally],
    one: Callable[[T, Tally], R],
    done: Callable[[R], None],
) -> None:
    """Call ``one`` for each piece of work, ``workers`` at a time and in the given order, with a
    tally of its own, and ``done`` with its result. Interrupted work is left out, as its result
    means nothing."""
    waiting = [(piece, Tally()) for piece in work]
    tallies += [tally for _, tally in waiting]

    def run(piece: T, tally: Tally) -> None:
        if tally.interrupted:
            return
        tally.started = time.monotonic()
        result = one(piece, tally)
        if not tally.interrupted:
            done(result)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(run, *item) for item in waiting]:
            future.result()


def _code(score: Score, change: Change | None) -> int:
    if false_alarms(score.controls) or (change and change.lost):
        return 1
    shipped = builtin_faults()
    unusable = [
        f"{f.id}: {f.problem or (f.miss.why if f.miss else '')}"
        for f in score.faults
        if f.problem or (f.idle and f.id not in shipped)  # built-in ones are tested to do something
    ]
    silent = [f"control {c.id}: {c.problem}" for c in score.controls if c.problem]
    wrong = [*score.problems, *unusable, *silent]
    for sentence in wrong:
        print(f"narrowfuzz: {sentence}", file=sys.stderr)
    return 2 if wrong else 0
