"""What the command line asks of a campaign, as it was typed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from narrowfuzz.case.spec import Case
from narrowfuzz.ledger.facts import Fact
from narrowfuzz.trace.words import options


@dataclass(frozen=True)
class Asked:
    """Options of ``narrowfuzz run`` and ``check``; what is left out is decided where it is used."""

    minutes: float | None = None
    #: So many cases instead; 0: by time.
    cases: int = 0
    #: 0: one per core or GPU.
    workers: int = 0
    recipes: tuple[str, ...] = ()
    recipe_files: tuple[Path, ...] = ()
    arms: tuple[str, ...] = ()
    #: Names of models, or FILE.py:build and package.module:build of a user's own; none: all.
    models: tuple[str, ...] = ()
    #: Globs of operators: models of nothing else are drawn.
    operators: tuple[str, ...] = ()
    device: str = ""
    seed: int | None = None
    out: Path | None = None
    resume: bool = False
    #: Cases that are tried beside the shipped ones; what finds something is added.
    corpus: Path | None = None
    ledger: bool = True
    #: Folders of entries of one's own.
    ledgers: tuple[Path, ...] = ()
    plant: str = ""
    te_version: str = ""
    fail_on: str = "low"
    #: Exit with 4 if a smaller share, in per cent, of what can run here was judged.
    min_judged: float = 0.0
    #: The folders of earlier runs, and a file of findings that are accepted: what is in any of them
    #: makes this one not fail.
    baseline: tuple[Path, ...] = ()
    suppress: Path | None = None
    #: File or URL of the database of many runs' findings; "": the one beside the runs, if this run
    #: is one of these.
    database: str = ""
    #: Say of each new finding what it needs and what makes it go away, after the search.
    explain: bool = False
    #: Tables of rules and pairs of features as well.
    verbose: bool = False
    #: The verdict and the findings only.
    quiet: bool = False
    #: The run of the other side of a comparison.
    beside: Path | None = None
    #: Judged before anything is drawn, in this order, and the arms that are meant: others run only
    #: to tell which is the first to show something. None: all.
    first: tuple[Case, ...] = ()
    meant: tuple[str, ...] = ()
    #: Single linears are drawn, too.
    linears: bool = True
    #: What holds of the configuration that was asked for: the ledger's entries that it rules out
    #: are not named. Empty where all kinds of cases are.
    configuration: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ValueError("--quiet says less and --verbose more: give one of them")

    @property
    def list_known(self) -> str:
        """The command that lists what is known of the recipes and arms that were asked for."""
        if not (self.recipes or self.arms):
            return "narrowfuzz list known"
        given = {"--recipe": self.recipes, "--arm": self.arms, "--recipe-file": self.recipe_files}
        return shlex.join(["narrowfuzz", "list", "known", *options(given)])
