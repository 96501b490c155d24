"""``narrowfuzz run``: validate, prepare the environment, run, report."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowfuzz_watch.folder import new_folder

from narrowfuzz.arms.available import none_runs, only_ranks, select_arms
from narrowfuzz.campaign.campaign import Campaign
from narrowfuzz.campaign.config import MINUTES, Config
from narrowfuzz.campaign.corpus import Corpus, keep, load, playable, shipped
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.layout.mesh import why_alone
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case
from narrowfuzz.draw.specs import fixed
from narrowfuzz.ledger.exits import (
    CLEAN,
    FAIL_ON,
    FOUND,
    INTERRUPTED,
    OURS,
    TOO_LITTLE,
    FailOn,
    fails,
)
from narrowfuzz.ledger.ledger import Ledger, standing
from narrowfuzz.machine.device import check_device, default_workers, enter, torch_name_before_begin
from narrowfuzz.machine.environment import prepare
from narrowfuzz.machine.overlay import active_releases
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.operators import models_of_operators
from narrowfuzz.own_models import register
from narrowfuzz.plants.registry import find_plant
from narrowfuzz.recipe.recipe import (
    UNCONVERTED,
    Recipe,
    load_every,
    obstacle,
    obstacles,
    runnable,
    select,
    unknown,
)
from narrowfuzz.report.accepted import accepted
from narrowfuzz.report.judged import judged
from narrowfuzz.report.lifetime import Database
from narrowfuzz.report.store import Store
from narrowfuzz.report.tally import Tally
from narrowfuzz.trace.words import few

#: Time limit of a run that ends after a number of cases.
_MOST_MINUTES = 60.0 * 24 * 7


def run_command(options: RunOptions) -> tuple[int, dict[str, Any]]:
    """Run a campaign; returns the exit code and the content of ``summary.json``. Raises ValueError
    for invalid options."""
    fail_on = next((level for level in FAIL_ON if level == options.fail_on), None)
    if fail_on is None:
        raise ValueError(unknown("level", options.fail_on, FAIL_ON, of="--fail-on"))
    if not 0 <= options.min_judged <= 100:
        raise ValueError(f"--min-judged must be a share from 0 to 100, got {options.min_judged:g}")
    if options.resume and options.out is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    allowed = accepted(options.baseline, options.suppress, datetime.date.today(), fail_on)
    select_arms(options.arms)
    planted = _plant(options.plant)
    if planted is not None:
        options = _as_planted(options, planted)
    options = dataclasses.replace(options, device=options.device or "cpu")
    workers = options.workers or default_workers(options.device)
    check_device(options.device, workers)
    prepare(options.plant)
    if options.te_version:
        from te_on_cpu import environment as te

        te.choose(options.te_version)
    # a model of the user's own is tried here, and may compile
    where = enter(options.device, 0, compiles=any(":" in name for name in options.models))
    if why := none_runs(options.arms, where.name):
        raise ValueError(why)
    options = _of_operators(options)
    models, own = _models(options.models)
    chosen, lacking = _recipes(options, where.torch)
    _check_ways(options.arms, models, chosen, where.torch)
    lacking += _models_that_cannot(models, chosen, torch_name_before_begin(where.name))
    loaded = _printed_ledger(where.torch, options.ledgers) if options.ledger else Ledger([])
    corpus = _corpus(options, chosen)
    lacking += corpus.unread
    folder = _output(options.out, options.resume)
    minutes = options.minutes
    if minutes is None:
        minutes = _MOST_MINUTES if options.cases else MINUTES
    config = Config(
        out=folder,
        minutes=minutes,
        cases=options.cases,
        workers=workers,
        seed=secrets.randbelow(2**32) if options.seed is None else options.seed,
        recipes=tuple(chosen),
        recipe_files=options.recipe_files,
        arms=options.arms,
        device=options.device,
        ledger=options.ledger,
        ledgers=options.ledgers,
        plant=planted,
        models=models,
        own=own,
        linears=options.linears and (not models or "linear" in models),
        first=tuple(map(dump_case, options.first or _first(chosen.values(), models))),
        corpus=tuple(map(dump_case, corpus.cases)),
        beside=options.beside,
        first_arms=options.first_arms,
    )
    # findings of planted faults and of the sides of a comparison are not recorded
    apart = bool(options.plant) or options.beside is not None
    database = None if apart else Database.of(options.database, folder)
    store = Store(folder)
    config = dataclasses.replace(config, part=store.begin())
    campaign = Campaign(options, config, store, chosen, lacking, loaded, where, allowed, database)
    tally, summary = campaign.run()
    if options.corpus is not None:
        keep(options.corpus, (finding.minimal for finding in store.findings()))
    return _code(campaign, tally, fail_on, lacking=summary["lacking"]), summary


def _corpus(options: RunOptions, recipes: Mapping[str, Recipe]) -> Corpus:
    """The cases of the shipped corpus and of --corpus that can run here. None in a comparison,
    whose sides must draw alike, and none with a user's own model, of which the corpus has no
    cases."""
    if options.beside or any(":" in name for name in options.models):
        return Corpus()
    # what cannot be read of the shipped one is about models of other releases
    found = Corpus(load(shipped()).cases)
    if options.corpus is not None:
        own = load(options.corpus)
        keep(options.corpus, ())  # raises before the run if it cannot be written to
        found = Corpus((*own.cases, *found.cases), own.unread)
    return Corpus(playable(found.cases, recipes, options.arms), found.unread)


def _first(recipes: Iterable[Recipe], models: tuple[str, ...]) -> Iterator[Case]:
    """For recipes of packages with models of their own: one case, as the model is trained, for each
    model and backend. Models of single operators are many, and have slices of their own."""
    for recipe in recipes:
        for model in recipe.models(models) if recipe.models_of else ():
            if MODELS[model].kind == "operator":
                continue
            for backend in recipe.backends:
                spec = Spec(
                    recipe=recipe.name, backend=backend, model=model, dtype=recipe.dtypes[0]
                )
                yield Case(spec=fixed(spec, recipe), data=DataSpec())


def _incomplete(campaign: Campaign, tally: Tally) -> bool:
    """Were workers lost before anything was judged, or were fewer cases judged than requested in a
    run without a time limit?"""
    judged, options = tally.counts["cases"], campaign.run_options
    counted = options.cases if options.minutes is None else 0
    return not tally.enough and (judged < counted or (not judged and tally.lost_workers > 0))


def _code(
    campaign: Campaign, tally: Tally, fail_on: FailOn, *, lacking: Collection[str] = ()
) -> int:
    """The exit code of a campaign that has ended. ``lacking``: what is missing for the claim that a
    user's model shows no divergence."""
    if tally.interrupted:
        return INTERRUPTED
    if tally.broken or _incomplete(campaign, tally):
        return OURS
    counting, store = campaign.accepted.counting, campaign.store
    found = [finding.severity for finding in counting(store.findings())]
    if fails(found, len(counting(store.suspected())), fail_on):
        return FOUND
    enough = campaign.judged(tally).share >= campaign.run_options.min_judged
    return CLEAN if enough and not lacking else TOO_LITTLE


def _as_planted(options: RunOptions, planted: tuple[str, str]) -> RunOptions:
    """The options, with the recipes, arms and device of the planted fault where none are named: it
    may patch a library that others run on, or be specific to a device."""
    what = find_plant(*planted)
    return dataclasses.replace(
        options,
        recipes=options.recipes or what.recipes,
        device=options.device or what.device,
        recipe_files=(*options.recipe_files, *what.recipe_files),
        arms=options.arms or what.arms,
    )


def _of_operators(options: RunOptions) -> RunOptions:
    """The options, with the models that consist of one of the named operators, and, if no recipe is
    named, the recipes that do not convert operators. Raises ValueError for a glob that matches no
    operator."""
    if not options.operators:
        return options
    models = (*options.models, *models_of_operators(options.operators))
    return dataclasses.replace(options, models=models, recipes=options.recipes or UNCONVERTED)


def _models(named: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the models, and the texts that name a user's own models."""
    own = tuple(text for text in named if ":" in text)
    names = tuple(name for text in named for name in _named(text))
    return tuple(dict.fromkeys(names)), own


def _named(text: str) -> list[str]:
    if ":" in text:
        return [model.name for model in register(text)]
    if hits := fnmatch.filter([name for name, model in MODELS.items() if not model.own], text):
        return hits
    raise ValueError(unknown("model", text, (*MODELS,)))


def _recipes(options: RunOptions, device: str) -> tuple[dict[str, Recipe], list[str]]:
    """The requested recipes that can run here, and a line for each recipe that cannot, or that runs
    only if it is named."""
    there = load_every(options.recipe_files, options.recipes)
    meant = any(glob != "*" for glob in options.recipes)
    over = {release.partition("==")[0] for release in active_releases()}
    unasked = [] if meant else [n for n, r in there.items() if r.process and r.process not in over]
    wanted = {n: r for n, r in select(there, options.recipes).items() if n not in unasked}
    unasked += [name for name, r in wanted.items() if not r.models(options.models)]
    wanted = {name: r for name, r in wanted.items() if name not in unasked}
    able = [n for n, recipe in there.items() if options.models and recipe.models(options.models)]
    if not wanted and able and all(there[name].models_of for name in able):
        raise ValueError(
            f"{few(options.models, 3)}: only {' or '.join(able)} runs such a model; add --recipe "
            f"{able[0]}"
        )
    if not wanted and options.operators:
        raise ValueError(
            f"--operator: {', '.join(unasked)} convert linears, of which an operator alone has "
            f"none; leave --recipe out, or name {' or '.join(UNCONVERTED)}"
        )
    if not wanted:
        raise ValueError(f"{', '.join(unasked)}: a library's own layers, and no --model, run there")
    chosen, lacking = _runnable(wanted, device)
    if patching := [name for name in unasked if there[name].process and not meant]:
        lacking.append(f"{', '.join(patching)}: only if named, as it patches a library")
    return chosen, lacking


def _check_ways(
    arms: Sequence[str], models: Sequence[str], recipes: Mapping[str, Recipe], device: str
) -> None:
    """Raises ValueError if none of the named models can run on any of the named arms."""
    if not (arms and models) or judged({}, recipes, select_arms(arms), models, device).never:
        return
    own = [MODELS[name] for name in models if MODELS[name].own]
    if only_ranks(arms) and len(own) == len(models) and (why := why_alone(own[0])):
        raise ValueError(f"--arm {' '.join(arms)}: no ranks can train {own[0].title}, as {why}")
    raise ValueError(
        f"--arm {' '.join(arms)}: {', '.join(recipes)} cannot run {few(models, 3)} that way; leave "
        "--arm out, or name others"
    )


def _models_that_cannot(
    models: Collection[str], recipes: Mapping[str, Recipe], device: str
) -> list[str]:
    """A line for each reason why a requested model runs under none of the recipes. Raises
    ValueError if none of the models can run."""
    reasons: dict[str, list[str]] = {}
    for name in models:
        taking = [recipe for recipe in recipes.values() if recipe.takes(name)]
        whys = [MODELS[name].why_not(device, recipe.dtypes) for recipe in taking]
        if whys and all(whys):
            reasons.setdefault(whys[0], []).append(name)
    lines = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
    if models and sum(map(len, reasons.values())) == len(models):
        raise ValueError(f"none of the chosen models can run here: {'; '.join(lines)}")
    return lines


def _printed_ledger(device: str, folders: tuple[Path, ...]) -> Ledger:
    """The ledger for the output: every entry. Those that name other versions than are installed,
    which workers may try, are the unnamed ones. Entries of packages that are absent here are
    included, as a package may be installed in a worker's process only."""
    every = standing(device, folders)
    return Ledger(
        [entry for entry, how in every if how != "other"],
        unnamed=[entry for entry, how in every if how == "other"],
    )


def _runnable(chosen: dict[str, Recipe], device: str) -> tuple[dict[str, Recipe], list[str]]:
    """The recipes that run here, and a line for each reason why a recipe or a backend does not.
    Raises ValueError if no recipe runs here."""
    able: dict[str, Recipe] = {}
    reasons: dict[str, list[str]] = {}
    for name, recipe in chosen.items():
        lacking = obstacles(recipe, device)
        here = runnable(recipe, device)
        if here is not None and (reason := obstacle(here, device)):
            lacking, here = {"": reason}, None
        if here is None and len({*lacking.values()}) == 1:
            lacking = {"": next(iter(lacking.values()))}
        for part, why in lacking.items():
            reasons.setdefault(why, []).append(f"{name}{f' ({part})' if part else ''}")
        if here is not None:
            able[name] = here
    lines = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
    if not able:
        raise ValueError(f"none of the chosen recipes can run here: {'; '.join(lines)}")
    return able, lines


def _plant(name: str) -> tuple[str, str] | None:
    file, _, id = name.rpartition(":")
    return (file, id) if name else None


def _output(out: Path | None, resume: bool) -> Path:
    if out is None:
        return new_folder()
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    holds_run = os.path.isfile(out / "findings.db")
    if holds_run and not resume:
        raise ValueError(f"--out {out} holds an earlier run: add --resume or name another folder")
    if resume and not holds_run:
        raise ValueError(f"--resume: {out} holds no run to go on with")
    return out
