"""One run: what it says at its head, while it goes on and at its end, and what it writes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from narrowfuzz.arm import BY_NAME
from narrowfuzz.arms.ladder import natives, rungs_of, select_arms
from narrowfuzz.campaign.accepted import Accepted
from narrowfuzz.campaign.asked import Asked
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.formats import write_formats
from narrowfuzz.campaign.judged import Judged, judged
from narrowfuzz.campaign.page import write_page
from narrowfuzz.campaign.store import Store
from narrowfuzz.device import Device
from narrowfuzz.overlay import laid
from narrowfuzz.recipe import AnyRecipe
from narrowfuzz.triage.finding import Finding

if TYPE_CHECKING:
    from narrowfuzz.campaign.supervisor import Tally
    from narrowfuzz.ledger import Entry, Ledger


@dataclass(frozen=True)
class Campaign:
    """One run: what it is asked, with what, and what comes of it."""

    asked: Asked
    config: Config
    store: Store
    recipes: dict[str, AnyRecipe]
    #: Why some of what was asked for does not run here, in lines.
    lacking: list[str]
    ledger: Ledger
    device: Device
    #: What does not make it fail.
    accepted: Accepted

    def run(self) -> Tally:
        """Run it, say and write what came of it."""
        from narrowfuzz.campaign.summary import hits_of, print_summary, print_unmet
        from narrowfuzz.campaign.supervisor import run_campaign

        console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        environment = self.environment()
        applying = self.applying()
        _print_head(console, self.config, environment, self.device.profile(), self.lacking)
        if self.asked.configuration:
            print_unmet(console, {}, applying, "known of this configuration, drawn or not:")
            applying = []
        live = _Live(console, self.config)
        tally = run_campaign(self.config, self.store, live.show)
        live.close()
        whole, share = drawable(self.recipes, self.config), self.judged(tally)
        print_summary(
            console, tally, self.store, self.ledger, whole, self.options(), applying,
            share, self.accepted, counted=bool(self.config.cases),
            verbose=self.asked.verbose,
            subject=self.asked.models[0] if self.asked.configuration else "",
            first=len(self.config.first),
        )  # fmt: skip
        summary = self.summary(tally, whole, share)
        write_formats(self.store, share, self.accepted, tally.seconds)
        hits = hits_of(tally.counts)
        entries = {entry.id: entry for entry in (*self.ledger.entries, *self.ledger.unnamed)}
        known = [(entries[name], hits[name]) for name in sorted(hits) if name in entries]
        write_page(
            self.store, summary, environment, share, self.accepted, known, self.applying(),
            self.entries(), self.options(),
        )  # fmt: skip
        self.store.write_json("env.json", environment)
        self.store.write_json("summary.json", summary)
        return tally

    def environment(self) -> dict[str, Any]:
        from narrowfuzz.environment import describe
        from narrowfuzz.policy import cast_policies

        return {
            **describe(), "device": self.device.describe(),
            "policies": cast_policies(self.device.torch),
        }  # fmt: skip

    def applying(self) -> list[Entry]:
        """The entries that what was asked for may show; none where all count as new."""
        if not self.config.ledger:
            return []
        from narrowfuzz.advice import applying
        from narrowfuzz.machine import machine

        arms = [BY_NAME[name] for name in select_arms(self.config.arms)]
        entries = (*self.ledger.entries, *self.ledger.unnamed)
        return applying(
            entries, self.recipes.values(), arms, machine(), self.device.torch,
            self.asked.configuration,
        )  # fmt: skip

    def entries(self) -> Sequence[Entry]:
        """What a finding may resemble: the entries that were asked, or every one if none was."""
        if self.config.ledger:
            return (*self.ledger.entries, *self.ledger.unnamed)
        from narrowfuzz.ledger import load_entries

        return load_entries(self.config.ledgers)

    def judged(self, tally: Tally) -> Judged:
        """What was judged of what was asked for and can run here."""
        return judged(
            tally.counts, self.recipes, select_arms(self.config.arms), self.config.models,
            self.device.torch,
        )  # fmt: skip

    def options(self) -> list[str]:
        """What a replay needs besides the finding's folder."""
        given = [text for file in self.asked.recipe_files for text in ("--recipe-file", str(file))]
        given += [text for own in self.config.own for text in ("--model", own)]
        given += [text for release in laid() for text in ("--with", release)]
        return given + (["--te-version", self.asked.te_version] if self.asked.te_version else [])

    def summary(self, tally: Tally, whole: frozenset[Any], share: Judged) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        from narrowfuzz.campaign.summary import pairs_seen, rule_counts, trials_seen
        from narrowfuzz.coverage import missing, table

        seen = pairs_seen(tally.counts)
        return {
            "cases": tally.counts["cases"],
            "cases_digest": tally.digest,
            "specs": tally.counts["specs"],
            "compiles": tally.counts["compiles"],
            "seconds": round(tally.seconds, 1),
            "compile_seconds": tally.counts["compile ms"] / 1000,
            "compiled_data_seconds": tally.counts["data ms"] / 1000,
            "judged": {"met": len(share.met), "of": len(share.met) + len(share.never)},
            "never_judged": [" ".join(one) for one in share.never],
            "pairs": {name: [met, there] for name, met, there in table(seen & whole, whole)},
            "pairs_never_met": missing(seen, whole),
            "first_verdict_seconds": round(tally.first_verdict, 1),
            "new": tally.new,
            "found": {
                one.finding.id: {"cases": one.cases, "seconds": round(one.seconds, 1)}
                for one in tally.found
            },
            "ledger": self.config.ledger,
            "findings": [_brief(finding) for finding in self.store.findings()],
            "suspected": [_brief(finding) for finding in self.store.suspected()],
            "lost_workers": tally.lost_workers,
            "interrupted": tally.interrupted,
            "seed": self.config.seed,
            "rules": rule_counts(tally.counts),
            "trials": trials_seen(tally.counts),
        }


def drawable(recipes: Mapping[str, AnyRecipe], config: Config) -> frozenset[Any]:
    """The pairs of features that cases of these recipes can have."""
    from narrowfuzz.coverage import universe

    allowed, device = select_arms(config.arms), config.device
    native = natives(allowed, device)
    models = {"models": config.models} if config.models else {}
    return universe(recipes, rungs_of(allowed, device), native=native, **models)


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
    """One line that keeps moving: on a terminal in place, elsewhere every ten seconds. Each finding
    is named as it comes."""

    def __init__(self, console: Console, config: Config) -> None:
        self.console, self.config, self.last = console, config, 0.0
        #: Ids of the findings that were named.
        self.named: set[str] = set()
        self.status = console.status("starting workers") if console.is_terminal else None
        self.every = 0.25 if self.status else 10.0
        if self.status:
            self.status.start()

    def show(self, tally: object) -> None:
        from narrowfuzz.campaign.supervisor import Tally

        assert isinstance(tally, Tally)
        for found in [found.finding for found in tally.found]:
            if found.id not in self.named:
                self.named.add(found.id)
                sentence = f"found: {found.sentence} ({found.recipe}, {found.arm})"
                self.console.print(escape(sentence), soft_wrap=True)
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
