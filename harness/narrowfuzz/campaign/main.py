"""``narrowfuzz run``: validate, prepare the environment, run, report."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from narrowfuzz.arm import BY_NAME
from narrowfuzz.arms.ladder import natives, rungs_of, select_arms
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.store import Store
from narrowfuzz.content import checkout
from narrowfuzz.device import Device, check_device, choose, default_workers, enter, torch_name
from narrowfuzz.environment import prepare, settle
from narrowfuzz.exits import CLEAN, FAIL_ON, FOUND, INTERRUPTED, OURS, fails
from narrowfuzz.plants.registry import find_plant
from narrowfuzz.recipe import (
    AnyRecipe,
    load_every,
    obstacle,
    obstacles,
    runnable,
    select,
    unknown,
)
from narrowfuzz.triage.finding import Finding

if TYPE_CHECKING:
    from narrowfuzz.campaign.supervisor import Tally
    from narrowfuzz.ledger import Entry, Ledger


#: A run that counts cases ends when these are judged.
_MOST_MINUTES = 60.0 * 24 * 7


def run_command(
    *,
    minutes: float | None,
    cases: int,
    workers: int,
    recipes: tuple[str, ...],
    recipe_files: tuple[Path, ...],
    arms: tuple[str, ...],
    device: str,
    seed: int | None,
    out: Path | None,
    resume: bool,
    ledger: bool,
    plant: str,
    te_version: str = "",
    fail_on: str = "low",
) -> int:
    """Run a campaign; returns the exit code. Raises ValueError for what cannot be asked for."""
    if fail_on not in FAIL_ON:
        raise ValueError(unknown("level", fail_on, FAIL_ON, of="--fail-on"))
    if resume and out is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    select_arms(arms)
    planted = _plant(plant)
    if planted is not None:
        what = find_plant(*planted)
        # it may patch a library that others run on, or be of a device
        recipes, device = recipes or what.recipes, device or what.device
        recipe_files, arms = (*recipe_files, *what.recipe_files), arms or what.arms
    device = device or "cpu"
    check_device(device, workers or default_workers(device))
    prepare(plant)
    if te_version:
        from te_on_cpu import environment as te

        te.choose(te_version)
    from narrowfuzz.ledger import Ledger

    choose(device)
    settle()
    where = enter(device)
    there = load_every(recipe_files)
    meant = any(glob != "*" for glob in recipes)
    unasked = [] if meant else [name for name, r in there.items() if r.process]
    asked = {name: r for name, r in select(there, recipes).items() if name not in unasked}
    chosen, lacking = _runnable(asked, where.torch)
    lacking += [f"{name}: only if named, as it patches a library" for name in unasked]
    loaded = _printed_ledger(where.torch) if ledger else Ledger([])
    folder = _output(out, resume)
    if minutes is None:
        minutes = _MOST_MINUTES if cases else 2.0
    config = Config(
        out=folder,
        minutes=minutes,
        cases=cases,
        workers=workers or default_workers(device),
        seed=secrets.randbelow(2**32) if seed is None else seed,
        recipes=tuple(chosen),
        recipe_files=recipe_files,
        arms=arms,
        device=device,
        ledger=ledger,
        plant=planted,
    )
    store = Store(folder)
    whole = _universe(chosen, config.arms, config.device)
    config = dataclasses.replace(config, part=store.begin())
    options = [text for file in recipe_files for text in ("--recipe-file", str(file))]
    options += ["--te-version", te_version] if te_version else []
    known = _applying(loaded, chosen, config) if ledger else []
    tally = _campaign(config, store, loaded, known, whole, lacking, options, where)
    if tally.interrupted:
        return INTERRUPTED
    if tally.broken:
        return OURS
    found = [finding.severity for finding in store.findings()]
    return FOUND if fails(found, len(store.suspected()), fail_on) else CLEAN


def _printed_ledger(device: str) -> Ledger:
    """Every entry, those that workers may try apart: what is installed in a worker's process only
    is absent here, and may have entries, too."""
    from narrowfuzz.ledger import Ledger, load_entries, stands

    standing = [(entry, stands(entry, device)) for entry in load_entries()]
    return Ledger(
        [entry for entry, how in standing if how != "other"],
        unnamed=[entry for entry, how in standing if how == "other"],
    )


def _applying(ledger: Ledger, chosen: dict[str, AnyRecipe], config: Config) -> list[Entry]:
    """The entries that what was asked for may show."""
    from narrowfuzz.advice import applying
    from narrowfuzz.machine import machine

    arms = [BY_NAME[name] for name in select_arms(config.arms)]
    device = torch_name(config.device)
    return applying(
        (*ledger.entries, *ledger.unnamed), chosen.values(), arms, machine(), device
    )  # fmt: skip


def _universe(chosen: dict[str, AnyRecipe], arms: tuple[str, ...], device: str) -> frozenset[Any]:
    """The pairs of features that this run can meet."""
    from narrowfuzz.coverage import universe

    allowed = select_arms(arms)
    return universe(chosen, rungs_of(allowed, device), native=natives(allowed, device))


def _campaign(
    config: Config,
    store: Store,
    ledger: Ledger,
    applying: list[Entry],
    whole: frozenset[Any],
    lacking: list[str],
    options: list[str],
    device: Device,
) -> Tally:
    """Run it, say and write what came of it."""
    from narrowfuzz.campaign.summary import (
        pairs_seen,
        print_summary,
        rule_counts,
        trials_seen,
    )
    from narrowfuzz.campaign.supervisor import run_campaign
    from narrowfuzz.environment import describe
    from narrowfuzz.policy import cast_policies

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    environment = {
        **describe(), "device": device.describe(), "policies": cast_policies(device.torch),
    }  # fmt: skip
    _print_head(console, config, environment, device.profile(), lacking)
    live = _Live(console, config)
    tally = run_campaign(config, store, live.show)
    live.close()
    print_summary(
        console, tally, store, ledger, whole, options, applying, counted=bool(config.cases)
    )
    from narrowfuzz.coverage import missing, table

    seen = pairs_seen(tally.counts)
    store.write_json("env.json", environment)
    store.write_json(
        "summary.json",
        {
            "cases": tally.counts["cases"],
            "cases_digest": tally.digest,
            "specs": tally.counts["specs"],
            "compiles": tally.counts["compiles"],
            "seconds": round(tally.seconds, 1),
            "compile_seconds": tally.counts["compile ms"] / 1000,
            "compiled_data_seconds": tally.counts["data ms"] / 1000,
            "pairs": {name: [met, there] for name, met, there in table(seen & whole, whole)},
            "pairs_never_met": missing(seen, whole),
            "first_verdict_seconds": round(tally.first_verdict, 1),
            "new": tally.new,
            "findings": [_brief(finding) for finding in store.findings()],
            "suspected": [_brief(finding) for finding in store.suspected()],
            "lost_workers": tally.lost_workers,
            "interrupted": tally.interrupted,
            "seed": config.seed,
            "rules": rule_counts(tally.counts),
            "trials": trials_seen(tally.counts),
        },
    )
    return tally


def _print_head(
    console: Console,
    config: Config,
    environment: dict[str, Any],
    profile: list[str],
    lacking: list[str],
) -> None:
    """What runs, on what, and what does not."""
    versions = environment["versions"]
    console.print(
        f"narrowfuzz {versions['narrowfuzz']}  torch {versions['torch']}  "
        f"torchao {versions['torchao']}  "
        f"device {config.device}  workers {config.workers}  seed {config.seed}",
        soft_wrap=True,
    )
    probed = "; ".join(f"{k}: {v}" for k, v in environment["policies"].items())
    console.print(f"cast policies (probed): {probed}", soft_wrap=True)
    console.print(f"how it adds (measured): {'; '.join(profile)}", soft_wrap=True)
    console.print(f"recipes: {', '.join(config.recipes)}", soft_wrap=True)
    if any(name.startswith("te.") for name in config.recipes):
        from te_on_cpu.environment import told

        console.print(f"TransformerEngine {told()}", soft_wrap=True)
    for line in lacking:
        console.print(f"not tested: {line}", soft_wrap=True)


def _brief(finding: Finding) -> dict[str, str]:
    """A finding in ``summary.json``; its folder holds the rest."""
    names = ("id", "fingerprint", "severity", "recipe", "arm", "sentence", "why_suspected")
    return {name: getattr(finding, name) for name in names}


class _Live:
    """One line that keeps moving: on a terminal in place, elsewhere every ten seconds."""

    def __init__(self, console: Console, config: Config) -> None:
        self.config, self.last = config, 0.0
        self.status = console.status("starting workers") if console.is_terminal else None
        self.every = 0.25 if self.status else 10.0
        if self.status:
            self.status.start()

    def show(self, tally: object) -> None:
        from narrowfuzz.campaign.supervisor import Tally

        assert isinstance(tally, Tally)
        if time.monotonic() - self.last < self.every:
            return
        self.last = time.monotonic()
        counts, seconds = tally.counts, tally.seconds
        asked, minutes = self.config.cases, self.config.minutes
        of_time, of_cases = ("", f" of {asked}") if asked else (f" of {minutes * 60:.0f}", "")
        line = (
            f"{seconds:4.0f} s{of_time}   {counts['cases']}{of_cases} cases "
            f"({counts['cases'] / max(seconds, 1):.0f}/s)   {counts['specs']} Specs   "
            f"{counts['compiles']} compiles   {tally.new} findings"
        )
        if self.status:
            self.status.update(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self.status:
            self.status.stop()


def _runnable(chosen: dict[str, AnyRecipe], device: str) -> tuple[dict[str, AnyRecipe], list[str]]:
    """The recipes that run here, and a line for each backend that does not. Raises ValueError if
    none does."""
    able: dict[str, AnyRecipe] = {}
    lines: list[str] = []
    for name, recipe in chosen.items():
        lacking = obstacles(recipe, device)
        here = runnable(recipe, device)
        if here is not None and (reason := obstacle(here, device)):
            lacking, here = {"": reason}, None
        lines += [f"{name}{f' ({part})' if part else ''}: {why}" for part, why in lacking.items()]
        if here is not None:
            able[name] = here
    if not able:
        raise ValueError(f"none of the chosen recipes can run here: {'; '.join(lines)}")
    return able, lines


def _plant(name: str) -> tuple[str, str] | None:
    file, _, id = name.rpartition(":")
    return (file, id) if name else None


def _output(out: Path | None, resume: bool) -> Path:
    if out is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        home = checkout()
        inside = home is not None and Path.cwd().resolve() == home
        return Path("reports/runs" if inside else "narrowfuzz-runs") / f"{stamp}-{os.getpid()}"
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    holds_run = os.path.isfile(out / "findings.db")
    if holds_run and not resume:
        raise ValueError(f"--out {out} holds an earlier run: add --resume or name another folder")
    if resume and not holds_run:
        raise ValueError(f"--resume: {out} holds no run to go on with")
    return out
