"""One run: its output at the beginning, while it runs and at its end, and the files it writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from narrowfuzz.arms.available import natives, on_ranks, rungs_of, select_arms
from narrowfuzz.campaign import comparison_side
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.live import Live
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.draw.coverage import missing, table, universe
from narrowfuzz.ledger import advice
from narrowfuzz.ledger.ledger import Entry, Ledger, load_entries
from narrowfuzz.machine.device import Device
from narrowfuzz.machine.environment import describe
from narrowfuzz.machine.machine import machine
from narrowfuzz.machine.overlay import active_releases
from narrowfuzz.machine.policy import cast_policies
from narrowfuzz.models.catalog import MODELS, title_of
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.report.accepted import Accepted
from narrowfuzz.report.formats import write_formats
from narrowfuzz.report.judged import Judged, judged
from narrowfuzz.report.lifetime import Database, record_run
from narrowfuzz.report.markdown import write_markdown
from narrowfuzz.report.outcome import Ended
from narrowfuzz.report.page import write_page
from narrowfuzz.report.store import Store
from narrowfuzz.report.summary import (
    pairs_seen,
    print_applying,
    print_summary,
    rule_counts,
    trials_seen,
)
from narrowfuzz.report.tally import Tally
from narrowfuzz.report.terminal import console
from narrowfuzz.trace.words import options
from narrowfuzz.triage.finding import Finding


@dataclass(frozen=True)
class Campaign:
    """One run: its options, the objects it uses, and its results."""

    run_options: RunOptions
    config: Config
    store: Store
    recipes: dict[str, Recipe]
    #: Lines that state why some of the requested recipes, models or cases do not run here.
    lacking: list[str]
    ledger: Ledger
    device: Device
    #: Decides which findings do not make the run fail.
    accepted: Accepted
    #: Records the findings beside those of other runs.
    database: Database | None = None

    def run(self) -> tuple[Tally, dict[str, Any]]:
        """Run the workers, print and write the results. Returns the tally and the content of
        ``summary.json``."""
        from narrowfuzz.campaign.supervisor import run_campaign  # imports torch

        verdict, around = consoles(self.run_options)
        environment = self.environment()
        applying, command = self.applying(), self.run_options.list_known
        _print_head(around, self.config, environment, self.lacking)
        if self.run_options.verbose:
            _print_probed(around, environment, self.device.profile())
        if self.run_options.configuration:
            print_applying(around, applying, "Known issues that may affect you:", command)
        live = Live(around, self.config)
        tally = run_campaign(self.config, self.store, live.show)
        tally.notes += [comparison_side.NOTE] * (self.config.beside is not None)
        live.close()
        if self.run_options.explain and not tally.interrupted:
            tally.notes += self.explain(around)
        if self.database is not None:
            tally.notes += record_run(self.database, self.store)
        ended = Ended(
            tally,
            self.store,
            self.ledger,
            self.judged(tally),
            self.accepted,
            whole=drawable(self.recipes, self.config),
            options=self.options(),
            applying=applying,
            list_known=command,
            counted=bool(self.config.cases),
            min_judged=self.run_options.min_judged,
            subject=title_of(self.config.models[0]) if self.run_options.configuration else "",
            first=len(self.config.first),
            filtered=self.config.ledger,
            entries=self.entries(),
        )
        print_summary(verdict, around, ended, verbose=self.run_options.verbose)
        summary = self.summary(ended)
        write_formats(ended)
        write_markdown(ended)
        write_page(ended, summary, environment)
        self.store.write_json("env.json", environment)
        self.store.write_json("summary.json", summary)
        return tally, summary

    def explain(self, around: Console) -> Iterator[str]:
        """Run ``narrowfuzz explain`` on each new finding, in a process of its own; yields a note
        for each finding that could not be explained."""
        new = [one for one in self.accepted.counting(self.store.findings()) if not one.known_issue]
        for finding in new:
            around.print(f"explaining: {finding.sentence}", soft_wrap=True, markup=False)
            command = [sys.executable, "-m", "narrowfuzz", "explain", *self.options()]
            command += options(
                {"--plant": [self.run_options.plant] if self.run_options.plant else []}
            )
            folder = self.store.out / "findings" / finding.id
            try:
                done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
            except KeyboardInterrupt:  # the search is over, and its report is still to be written
                yield f"interrupted: {finding.id} and what comes after it is not explained"
                return
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
                yield f"not explained: {finding.id}: {last.removeprefix('narrowfuzz: ')}"

    def environment(self) -> dict[str, Any]:
        return {
            **describe(),
            "device": self.device.describe(),
            "policies": cast_policies(self.device.torch),
        }

    def applying(self) -> list[Entry]:
        """The entries of the ledger that the requested recipes, arms and models may show; none
        where known issues count as new."""
        if not self.config.ledger:
            return []
        arms = [BY_NAME[name] for name in select_arms(self.config.arms)]
        entries = (*self.ledger.entries, *self.ledger.unnamed)
        models = self.config.models
        if not models and all(recipe.models_of for recipe in self.recipes.values()):
            models = tuple(name for one in self.recipes.values() for name in one.models(()))
        return advice.applying(
            entries,
            self.recipes.values(),
            arms,
            machine(),
            self.device.torch,
            self.run_options.configuration or advice.of_models([MODELS[name] for name in models]),
        )

    def entries(self) -> Sequence[Entry]:
        """The entries that a finding may resemble: those of this run's ledger, or all if it has
        none."""
        if self.config.ledger:
            return (*self.ledger.entries, *self.ledger.unnamed)
        return load_entries(self.config.ledgers)

    def judged(self, tally: Tally) -> Judged:
        """Which combinations of recipe, arm and model that can run here were judged."""
        return judged(
            tally.counts,
            self.recipes,
            self.run_options.first_arms or select_arms(self.config.arms),
            self.config.models,
            self.device.torch,
        )

    def options(self) -> list[str]:
        """The options that a replay needs besides the finding's folder."""
        given = {"--recipe-file": self.run_options.recipe_files, "--model": self.config.own}
        version = [self.run_options.te_version] if self.run_options.te_version else []
        return options(given) + options({"--with": active_releases(), "--te-version": version})

    def summary(self, ended: Ended) -> dict[str, Any]:
        """The content of ``summary.json``."""
        tally, whole, share = ended.tally, ended.whole, ended.share
        seen = pairs_seen(tally.counts)
        return {
            "cases": tally.counts["cases"],
            "cases_digest": "" if tally.interrupted else tally.digest,
            "specs": tally.counts["specs"],
            "specs_of_corpus": tally.counts["corpus"],
            "compiles": tally.counts["compiles"],
            "seconds": round(tally.seconds, 1),
            "compile_seconds": tally.counts["compile ms"] / 1000,
            "compiled_data_seconds": tally.counts["data ms"] / 1000,
            "judged": {"met": len(share.met), "of": len(share.met) + len(share.never)},
            **(
                {"first_cases": {"ran": ended.first_ran, "of": ended.first}}
                if ended.subject
                else {}
            ),
            "never_judged": [" ".join(one) for one in share.never],
            "never_judged_because": {" ".join(one): why for one, why in sorted(share.why.items())},
            "linears_judged": list(_linears_judged(share)),
            "pairs": {name: [met, there] for name, met, there in table(seen & whole, whole)},
            "pairs_never_met": missing(seen, whole),
            "pairs_met_after_seconds": {str(at): met for at, met in tally.pairs_after.items()},
            "first_verdict_seconds": round(tally.first_verdict, 1),
            "new": tally.new,
            "found": {
                one.finding.id: {"cases": one.cases, "seconds": round(one.seconds, 1)}
                for one in tally.found
            },
            "ledger": self.config.ledger,
            "findings": [_brief(finding) for finding in self.store.findings()],
            "suspected": [_brief(finding) for finding in self.store.suspected()],
            "known": {entry.id: hits for entry, hits in ended.known},
            "soundness": ended.soundness(),
            "lacking": ended.lacking,
            "notes": ended.notes,
            "lost_workers": tally.lost_workers,
            "interrupted": tally.interrupted,
            "seed": self.config.seed,
            "rules": rule_counts(tally.counts),
            "trials": trials_seen(tally.counts),
        }


def _linears_judged(share: Judged) -> Iterator[dict[str, Any]]:
    """For a user's model, on each recipe and arm of one process: the linears that rules checked one
    by one, and how many linears there are."""
    for recipe, arm, name in sorted(share.met):
        model = MODELS.get(name)
        # on ranks a model is compared as a whole
        if model is not None and model.own and not BY_NAME[arm].sharded:
            seen = share.layers[recipe, arm, name]
            one_by_one = [layer for layer in model.linears if layer in seen]
            yield {
                "recipe": recipe,
                "arm": arm,
                "model": model.title,
                "linears": one_by_one,
                "of": len(model.linears),
            }


def consoles(options: RunOptions) -> tuple[Console, Console]:
    """The console for the verdict and the findings, and the one for all other output, which prints
    nothing with --quiet."""
    return console(), console(quiet=options.quiet)


def drawable(recipes: Mapping[str, Recipe], config: Config) -> frozenset[Any]:
    """The pairs of features that cases of these recipes can have."""
    allowed, device = select_arms(config.arms), config.device
    native = natives(allowed, device)
    models = {"models": config.models} if config.models else {}
    sharded = on_ranks(allowed, device)
    return universe(recipes, rungs_of(allowed, device), native=native, sharded=sharded, **models)


def _print_head(
    console: Console,
    config: Config,
    environment: dict[str, Any],
    lacking: list[str],
) -> None:
    """Print versions, device and recipes of the run, and what is not tested."""
    versions = environment["versions"]
    console.print(
        f"narrowfuzz {versions['narrowfuzz']}  torch {versions['torch']}  "
        f"torchao {versions['torchao']}  "
        f"device {config.device}  workers {config.workers}  seed {config.seed}"
    )
    for package, folder in environment["checkouts"].items():
        console.print(f"{package} is no release, but {folder}")
    console.print(f"recipes: {', '.join(config.recipes)}")
    if any(name.startswith("te.") for name in config.recipes):
        from te_on_cpu.environment import description

        console.print(f"TransformerEngine {description()}")
    for line in lacking:
        console.print(f"not tested: {line}")


def _print_probed(console: Console, environment: dict[str, Any], profile: list[str]) -> None:
    """Print how this machine casts and adds, as ``narrowfuzz doctor`` does, too."""
    probed = "; ".join(f"{k}: {v}" for k, v in environment["policies"].items())
    console.print(f"how it casts (probed): {probed}")
    console.print(f"how it adds (measured): {'; '.join(profile)}")


def _brief(finding: Finding) -> dict[str, str]:
    """A finding as ``summary.json`` lists it; the finding's folder holds the rest."""
    names = ("id", "fingerprint", "severity", "recipe", "arm", "sentence", "why_suspected")
    fields = {name: getattr(finding, name) for name in names}
    return fields | {"known_issue": finding.known_issue or ""}
