"""``narrowfuzz vacuity``: judges drawn cases, and checks for every pass whether it could have
failed. The perturbations that it tries are in ``reads.py`` and ``schedules.py``, and in a rule's
own ``Datum``."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import get_args

from narrowfuzz.case.arm import Compile
from narrowfuzz.case.kind import CONVERTED, LAYERS, kind_of
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.specs import of_rung
from narrowfuzz.draw.strategies import batches, schedule_cases
from narrowfuzz.judge.judge import Judge
from narrowfuzz.machine.device import check_device
from narrowfuzz.numerics.reference import Undivided
from narrowfuzz.power import reads, schedules
from narrowfuzz.power.perturbation import once_each
from narrowfuzz.power.probe import Pass, Passes, Table, falsifying, probe
from narrowfuzz.power.record import formatted
from narrowfuzz.power.report import print_vacuity, vacuity_json
from narrowfuzz.recipe.recipe import Recipe, load_every, processes, select, unknown
from narrowfuzz.recipe.source import CONVERTED as CONVERTING
from narrowfuzz.recipe.source import LIBRARY
from narrowfuzz.report.terminal import console
from narrowfuzz.rules import rules_of
from narrowfuzz.rules.applied import checks
from narrowfuzz.rules.rule import Rule
from narrowfuzz.triage.session import SessionOptions, open_session

#: Kind of case -> the perturbations of what its rules read.
_FALSIFIES = {**dict.fromkeys(CONVERTED, reads.FALSIFIES), LAYERS: schedules.FALSIFIES}
#: Data draws of one Spec, and the number of relations (rules with ``reruns``) that are applied to
#: each of them besides all other rules.
DRAWS, RELATIONS = 4, 6


def vacuity_command(
    globs: Sequence[str], cases: int, seed: int, compile: str, device: str, out: Path | None
) -> None:
    """Measure, print, and write to ``out``. Raises ValueError for an unknown recipe, rung or
    device."""
    check_device(device)
    rungs = {name: name for name in get_args(Compile)}
    if compile not in rungs:
        raise ValueError(unknown("rung", compile, rungs))
    found = run(_chosen(globs), cases, seed, rungs[compile], device)
    print_vacuity(console(), found)
    if out is not None:
        out.write_bytes(formatted(vacuity_json(found)))


def _chosen(globs: Sequence[str]) -> dict[str, Recipe]:
    """The recipes that match a glob; without globs, all that patch no library."""
    every = load_every()
    if not globs:
        return {name: recipe for name, recipe in every.items() if not recipe.process}
    return select(every, globs)


def run(
    recipes: Mapping[str, Recipe], cases: int, seed: int, compile: Compile, device: str
) -> Table:
    """Measure ``cases`` cases of each recipe. Recipes that patch a library run in a process of
    their own, one for each kind of patch; the others run in this process."""
    found: Table = {}
    for process in processes(recipes.values()):
        mine = {n: recipe for n, recipe in recipes.items() if recipe.process == process}
        if not process:
            found |= _measured(tuple(mine), cases, seed, compile, device)
            continue
        for recipe in mine.values():
            recipe.provide()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found |= pool.submit(_measured, tuple(mine), cases, seed, compile, device).result()
    return found


def _measured(names: Sequence[str], cases: int, seed: int, compile: Compile, device: str) -> Table:
    session = open_session(SessionOptions(device=device, recipes=names, ledger="named"))
    recipes = [*session.prepared_recipes().values()]
    return measure(session.judge, recipes, cases, seed, compile=compile)


def measure(
    judge: Judge,
    recipes: Sequence[Recipe],
    cases: int,
    seed: int,
    *,
    compile: Compile = "none",
) -> Table:
    """(rule, recipe) -> its passes on ``cases`` cases of each recipe."""
    found: Table = {}
    for recipe in recipes:
        for case, rules in drawn(recipe, cases, f"{seed}/{recipe.name}", compile):
            for one in passes(judge, case, rules):
                found.setdefault((one.rule, recipe.name), Passes()).take(case, one)
    return found


def passes(judge: Judge, case: Case, rules: Sequence[Rule]) -> Iterator[Pass]:
    """Every pass of these rules on one case."""
    evidence = once_each(judge.observe(case))
    falsify = falsifying(rules, _FALSIFIES[kind_of(case.spec)])
    with suppress(Undivided):  # ran although the plan's blocks do not divide it: that is a finding
        for at, check, seen in checks(evidence, rules):
            yield from probe(check, seen, falsify, at.layer)


#: Cases, each with the rules that are applied to it.
Drawn = Iterator[tuple[Case, Sequence[Rule]]]


def drawn(recipe: Recipe, cases: int, name: str, compile: Compile) -> Drawn:
    """Cases from the strategies of campaigns. As there, every rule is applied to a Spec's first
    draw; to later draws the rules without ``reruns`` and some relations in turn."""
    number = random.Random(name).getrandbits(64)
    return _DRAWN[recipe.source](recipe, cases, number, compile)


def _of_the_library(recipe: Recipe, cases: int, number: int, compile: Compile) -> Drawn:
    for case in examples(schedule_cases([recipe]), cases, number):
        yield case, tuple(rules_of(case.spec).values())


def _converted(recipe: Recipe, cases: int, number: int, compile: Compile) -> Drawn:
    every = tuple(rules_of(Spec(recipe=recipe.name)).values())
    relations = itertools.cycle(rule for rule in every if rule.reruns)
    core = tuple(rule for rule in every if not rule.reruns)
    batch = batches(of_rung([recipe], compile, largest=128), draws=DRAWS)
    for one in examples(batch, -(-cases // DRAWS), number):
        for i, case in enumerate(one):
            some = tuple(itertools.islice(relations, RELATIONS))
            yield case, every if i == 0 else (*core, *some)


#: Source of a recipe's modules -> the function that draws its cases.
_DRAWN = {CONVERTING: _converted, LIBRARY: _of_the_library}
