"""Opens all that a process needs to judge cases: device, recipes, known issues and judge.

    session = open_session(SessionOptions(recipes=("torchao.*",)))
    session.judge.judge(case)

Call ``machine.environment.prepare`` before, as torch reads the environment when it is imported.
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
    """The options of a session."""

    #: The device's name as on the command line, or the device that this process has entered; and
    #: the ``worker`` whose GPU it takes if there are several, as for ``machine.device.enter``.
    device: str | Device = "cpu"
    worker: int | None = 0
    #: Globs that select recipes, none for all recipes; and files that define further recipes.
    recipes: Collection[str] = ()
    recipe_files: Sequence[Path] = ()
    #: A user's own models, as FILE.py:build or package.module:build.
    models: Sequence[str] = ()
    #: Names of the arms that cases run on; None: all.
    arms: frozenset[str] | None = None
    #: The known issues by which the judge explains divergences. ``tried``: an entry that names
    #: other versions than the installed ones explains a divergence if its script, run then, still
    #: shows it; ``named``: such an entry explains nothing; ``none``: the judge knows no issues.
    ledger: Literal["tried", "named", "none"] = "tried"
    #: Folders with a user's own entries of the ledger.
    ledgers: Sequence[Path] = ()


@dataclass(frozen=True)
class Session:
    """What a process needs to judge cases."""

    options: SessionOptions
    device: Device
    #: All recipes by name, and those that the options select.
    recipes: dict[str, Recipe]
    selected: dict[str, Recipe]
    trials: Trials

    def runnable_recipes(self, process: str | None = None) -> dict[str, Recipe]:
        """The selected recipes that can run on this device, each with only those backends that can.
        With ``process``, only recipes that need this kind of process."""
        mine = [r for r in self.selected.values() if process in (None, r.process)]
        return {r.name: here for r in mine if (here := runnable(r, self.device.torch))}

    def prepared_recipes(self, process: str | None = None) -> dict[str, Recipe]:
        """As ``runnable_recipes``, after each recipe has patched and imported what it needs. Call
        it before ``ledger``: entries are about installed packages, and a recipe may provide such a
        package.
        """
        found = self.runnable_recipes(process)
        for recipe in found.values():
            recipe.prepare()
        return found

    @cached_property
    def ledger(self) -> Ledger:
        """The known issues of the packages that are installed when this is first read. Raises
        ValueError naming a file that is not valid."""
        tried = {} if self.options.ledger == "named" else {"shows": self.trials}
        return load_ledger(device=self.device.torch, folders=self.options.ledgers, **tried)

    @property
    def unfiltered_ledger(self) -> Ledger | None:
        """The ledger that findings are compared with if the judge knows no issues; else None."""
        return self.ledger if self.options.ledger == "none" else None

    @cached_property
    def judge(self) -> Judge:
        """The judge of this session, which caches the programs that it has built."""
        return self.new_judge(Ledger([]) if self.options.ledger == "none" else self.ledger)

    def new_judge(self, ledger: Ledger) -> Judge:
        """Another judge, which has built no programs yet and knows this ledger."""
        return Judge(self.recipes, ledger, self.options.arms, device=self.device)


def open_session(options: SessionOptions) -> Session:
    """Prepare this process for judging cases: enter the device, register models, load recipes.

    Raises ValueError for a model that cannot be judged, a file of recipes that cannot be loaded and
    a glob that matches no recipe.
    """
    device = options.device
    if isinstance(device, str):
        device = enter(device, options.worker)
    for model in options.models:
        register(model)
    recipes = load_every(options.recipe_files, options.recipes)
    selected = select(recipes, options.recipes)
    return Session(options, device, recipes, selected, Trials(device=device.name))
