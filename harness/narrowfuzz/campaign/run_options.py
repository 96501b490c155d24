"""Options of a campaign as they were typed on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from narrowfuzz.case.spec import Case
from narrowfuzz.ledger.facts import Fact
from narrowfuzz.trace.words import options


@dataclass(frozen=True)
class RunOptions:
    """Options of ``narrowfuzz run`` and ``check``; defaults of omitted ones are set where used."""

    minutes: float | None = None
    #: Number of cases after which the run ends; 0: it ends by time.
    cases: int = 0
    #: Number of worker processes; 0: one per core or GPU.
    workers: int = 0
    recipes: tuple[str, ...] = ()
    recipe_files: tuple[Path, ...] = ()
    arms: tuple[str, ...] = ()
    #: Globs of models, or FILE.py:build and package.module:build of a user's own; none: all.
    models: tuple[str, ...] = ()
    #: Globs of operators: models that consist of a matching operator only are added to ``models``.
    operators: tuple[str, ...] = ()
    device: str = ""
    seed: int | None = None
    out: Path | None = None
    resume: bool = False
    #: Folder of cases that are tried besides the shipped ones; minimal cases of findings are added.
    corpus: Path | None = None
    ledger: bool = True
    #: Folders with a user's own entries of the ledger.
    ledgers: tuple[Path, ...] = ()
    plant: str = ""
    te_version: str = ""
    fail_on: str = "low"
    #: Exit with 4 if less than this, in per cent, of what can run here was judged.
    min_judged: float = 0.0
    #: The folders of earlier runs, and a file of accepted findings: findings in any of them do not
    #: make this run fail.
    baseline: tuple[Path, ...] = ()
    suppress: Path | None = None
    #: File or URL of the database of many runs' findings; "": the default one in narrowfuzz's own
    #: folder of runs, if this run is written there.
    database: str = ""
    #: After the search, report for each new finding what it needs and what makes it go away.
    explain: bool = False
    #: Print tables of rules and pairs of features as well.
    verbose: bool = False
    #: Print the verdict and the findings only.
    quiet: bool = False
    #: The folder of the run of the other side of a comparison.
    beside: Path | None = None
    #: Cases that are judged before any is drawn, in this order; and the arms on which they are
    #: judged: others run only to tell which arm is the first to show a divergence. Empty: all arms.
    first: tuple[Case, ...] = ()
    first_arms: tuple[str, ...] = ()
    #: Whether single linears are drawn, too.
    linears: bool = True
    #: Facts about the requested configuration: entries of the ledger that they rule out are not
    #: named. Empty where cases of all kinds are requested.
    configuration: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ValueError("--quiet says less and --verbose more: give one of them")

    @property
    def list_known(self) -> str:
        """The command that lists the known issues of the requested recipes and arms."""
        if not (self.recipes or self.arms):
            return "narrowfuzz list known"
        given = {"--recipe": self.recipes, "--arm": self.arms, "--recipe-file": self.recipe_files}
        return shlex.join(["narrowfuzz", "list", "known", *options(given)])
