"""Commands that fuzz: all recipes and models, a user's own model, two versions of a library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowfuzz.cli.options import (
    COMPILES,
    ArmGlobs,
    Baseline,
    Cases,
    Database,
    DeviceName,
    FailOn,
    Files,
    Globs,
    Json,
    Ledgers,
    MinJudged,
    Minutes,
    ModelFiles,
    OtherSeed,
    Out,
    Plant,
    Quiet,
    Seed,
    Suppress,
    TeVersion,
    Verbose,
    With,
    Workers,
    typed,
)
from narrowfuzz.machine.overlay import restart_with_releases
from narrowfuzz.report.document import run_and_print
from narrowfuzz.trace import words


def run(
    minutes: Minutes = None,
    cases: Cases = 0,
    workers: Workers = 0,
    recipes: Globs = None,
    recipe_files: Files = None,
    arms: ArmGlobs = None,
    models: ModelFiles = None,
    operators: Annotated[
        list[str] | None,
        typer.Option(
            "--operator",
            metavar="GLOB",
            help="Test these operators of PyTorch (`list operators`; attention, 'layer_norm*') in "
            "models of nothing else, added to those of --model; may repeat. Without --recipe "
            "nothing is converted.",
        ),
    ] = None,
    device: DeviceName = "",
    seed: Seed = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of cases to try first, with variations of them, besides those that come "
            "with narrowfuzz; the smallest case of each finding is added to it.",
        ),
    ] = None,
    ledgers: Ledgers = None,
    no_ledger: Annotated[
        bool, typer.Option("--no-ledger", help="Report known issues, too, as if they were new.")
    ] = False,
    plant: Plant = "",
    te_version: TeVersion = "",
    with_: With = None,
    fail_on: FailOn = "low",
    min_judged: MinJudged = 0.0,
    baseline: Baseline = None,
    suppress: Suppress = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Run `explain` on each new finding: a minute each at most, five if compiled.",
        ),
    ] = False,
    database: Database = "",
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
    beside: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Fuzz: generate random cases, check them, reduce and confirm failures.

    Exit code 0: nothing new; 1: new findings; 2: wrong options;
    3: the run is not complete; 4: less was checked than --min-judged asks;
    130: interrupted.
    """
    given = typed(locals(), "no_ledger", "with_", "json")
    restart_with_releases(with_ or ())
    if not te_version:  # a named version must be chosen first
        _start_early(device, plant)
    from narrowfuzz.campaign.main import run_command
    from narrowfuzz.campaign.run_options import RunOptions

    options = RunOptions(**given, ledger=not no_ledger)
    raise typer.Exit(_ended(json, partial(run_command, options)))


def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:build",
            help="A function that returns your module and its example inputs; or "
            "package.module:build.",
        ),
    ],
    recipes: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            metavar="GLOB",
            help="The recipe (conversion) that you train with, as `list recipes` names it; may "
            "repeat. Without this option nothing is converted.",
            show_default="torch.DTYPE, the dtype of the model's weights",
        ),
    ] = None,
    recipe_files: Files = None,
    compile: Annotated[
        str,
        typer.Option(help=f"How you compile: {COMPILES}."),
    ] = "none",
    checkpoint: Annotated[
        str,
        typer.Option(help="How you checkpoint activations: none, full, reentrant or selective."),
    ] = "none",
    arms: ArmGlobs = None,
    minutes: Minutes = None,
    cases: Cases = 0,
    workers: Workers = 0,
    device: DeviceName = "",
    seed: Seed = None,
    out: Out = None,
    fail_on: FailOn = "low",
    min_judged: MinJudged = 100.0,
    ledgers: Ledgers = None,
    baseline: Baseline = None,
    suppress: Suppress = None,
    plant: Plant = "",
    with_: With = None,
    database: Database = "",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="GLOB",
            help="Linears to convert, by name; !GLOB: linears not to convert; may repeat.",
        ),
    ] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Check your model for numerical bugs, in the configuration that you train it in.

    Exit codes are those of run; by default 4 if something that can run here was not checked.
    """
    given = typed(locals(), "model", "compile", "checkpoint", "only", "with_", "json")
    restart_with_releases(with_ or ())
    _start_early(device, plant)
    from narrowfuzz.campaign.check import check_command
    from narrowfuzz.campaign.run_options import RunOptions

    options = RunOptions(**given, models=(model,))
    do = partial(check_command, options, compile, checkpoint, tuple(only or ()))
    raise typer.Exit(_ended(json, do))


def compare(
    first: Annotated[
        str,
        typer.Argument(
            help="A Python executable, a virtual environment, a release (torchao==0.17.0), or a "
            "folder of packages to put before the installed ones."
        ),
    ],
    second: Annotated[str, typer.Argument(help="What to compare it with, in the same form.")],
    out: Annotated[Path, typer.Option(help="Output folder, with one run for each side.")],
    cases: Annotated[int, typer.Option(metavar="N", help="Number of cases.")] = 500,
    seed: OtherSeed = 1,
    workers: Workers = 1,
    recipe: Globs = None,
    recipe_file: Files = None,
    arm: ArmGlobs = None,
    model: ModelFiles = None,
    ledger: Ledgers = None,
    no_ledger: Annotated[
        bool, typer.Option("--no-ledger", help="Treat known issues like any other finding.")
    ] = False,
    fail_on: FailOn = "low",
    suppress: Suppress = None,
    accept: Annotated[
        Path | None,
        typer.Option(help="Write what only SECOND shows into this file, for a later --suppress."),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Why the change is intended; --accept needs it.")
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            help="Day from which what was accepted counts again, as 2027-01-31. Default: in 90 "
            "days."
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Run the same cases on two versions of a library and show what differs.

    Exit code 0: no difference; 1: they differ; 2: wrong options, or a side
    cannot run; 3: a run did not finish; 4: nothing was checked on both.
    """
    from narrowfuzz.campaign.accept import Accepting
    from narrowfuzz.campaign.compare import CompareOptions, compare_command

    given: dict[str, list[Any] | None] = {
        "--recipe": recipe,
        "--arm": arm,
        "--model": model,
        "--recipe-file": recipe_file,
        "--ledger": ledger,
        "--suppress": [suppress] if suppress else None,
        "--fail-on": [fail_on],
    }
    more = words.options(given) + ["--no-ledger"] * no_ledger
    accepting = Accepting(accept, reason, until)
    options = CompareOptions(
        out=out, cases=cases, seed=seed, workers=workers, more=more, accepting=accepting
    )
    raise typer.Exit(_ended(json, partial(compare_command, first, second, options)))


def _start_early(device: str, plant: str) -> None:
    from narrowfuzz.campaign.server import start_early

    start_early(device or "cpu", plant)


def _ended(json: bool, do: Callable[[], tuple[int, dict[str, Any]]]) -> int:
    """Run a campaign, which prints its own output; returns its exit code."""
    return run_and_print(json, do, lambda ended: None, lambda ended: ended[1])[0]
