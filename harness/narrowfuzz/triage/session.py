"""A process that judges cases opens what it needs here: device, recipes, known issues and judge.

    session = open_session(SessionOptions(recipes=("torchao.*",)))
    session.judge.judge(case)

The environment comes before it, with ``machine.environment.prepare``, as torch reads that when it
is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.machine.device import Device, enter
from narrowfuzz.own_models import register
from narrowfuzz.recipe.recipe import Recipe, load_every, runnable, select
from narrowfuzz.triage.trials import Trials


@dataclass(frozen=True)
class SessionOptions:
    """What a session is opened for."""

    #: As a user names it, or as this process has entered it; whose GPU of several it takes, as
    #: ``machine.device.enter`` says.
    device: str | Device = "cpu"
    worker: int | None = 0
    #: Globs of the recipes that are selected, all if there is none, and files of further ones.
    recipes: Collection[str] = ()
    recipe_files: Sequence[Path] = ()
    #: A user's own models, as FILE.py:build or package.module:build.
    models: Sequence[str] = ()
    #: Names of the arms that cases run on; None: all.
    arms: frozenset[str] | None = None
    #: Known issues that the judge explains divergences with. ``tried``: an entry that names other
    #: versions runs its script when it would explain something; ``named``: it explains nothing.
    ledger: Literal["tried", "named", "none"] = "tried"
    #: Folders with a user's own entries.
    ledgers: Sequence[Path] = ()


@dataclass(frozen=True)
class Session:
    """What a process judges with."""

    options: SessionOptions
    device: Device
    #: Every recipe by name, and those that the options select.
    recipes: dict[str, Recipe]
    selected: dict[str, Recipe]
    trials: Trials

    def able(self, process: str | None = None) -> dict[str, Recipe]:
        """The selected recipes that run here, with the backends that do; ``process``: of those only
        that need this kind of process."""
        mine = [r for r in self.selected.values() if process in (None, r.process)]
        return {r.name: here for r in mine if (here := runnable(r, self.device.torch))}

    def prepared(self, process: str | None = None) -> dict[str, Recipe]:
        """As ``able``, after each has patched and imported what it needs. Comes before the ledger:
        entries are about what is installed, and a recipe may bring that along."""
        found = self.able(process)
        for recipe in found.values():
            recipe.prepare()
        return found

    @cached_property
    def ledger(self) -> Ledger:
        """The known issues of what is installed when this is first asked for. Raises ValueError
        naming a file that is not valid."""
        tried = {} if self.options.ledger == "named" else {"shows": self.trials}
        return load_ledger(device=self.device.torch, folders=self.options.ledgers, **tried)

    @property
    def unasked(self) -> Ledger | None:
        """What a finding is held against where the judge is told of no known issue."""
        return self.ledger if self.options.ledger == "none" else None

    @cached_property
    def judge(self) -> Judge:
        """The judge of this session, which keeps the programs it has built."""
        return self.new_judge(Ledger([]) if self.options.ledger == "none" else self.ledger)

    def new_judge(self, ledger: Ledger) -> Judge:
        """Another one, that has built nothing yet and knows this ledger."""
        return Judge(self.recipes, ledger, self.options.arms, device=self.device)


def open_session(options: SessionOptions) -> Session:
    """Make this process one that judges cases.

    Raises ValueError for a model that cannot be judged, a file of recipes that cannot be loaded and
    a glob that matches none.
    """
    device = options.device
    if isinstance(device, str):
        device = enter(device, options.worker)
    for model in options.models:
        register(model)
    recipes = load_every(options.recipe_files, options.recipes)
    selected = select(recipes, options.recipes)
    return Session(options, device, recipes, selected, Trials(device=device.name))
