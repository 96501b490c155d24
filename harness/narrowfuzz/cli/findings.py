"""Commands about one finding: does it still show, what does it need, since when, and a report."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from narrowfuzz.cli.options import (
    AboutModel,
    ArmGlobs,
    Database,
    Files,
    Json,
    PlantAgain,
    TeVersion,
    With,
    typed,
)
from narrowfuzz.machine.overlay import restart_with_releases
from narrowfuzz.report.document import run_and_print


def replay(
    case: Annotated[str, typer.Argument(help="A finding's id or folder, or a case file.")],
    arms: ArmGlobs = None,
    recipe_files: Files = None,
    te_version: TeVersion = "",
    with_: With = None,
    device: Annotated[
        str, typer.Option(help="Device to use.", show_default="where it was found")
    ] = "",
    models: AboutModel = None,
    database: Database = "",
    json: Json = False,
) -> None:
    """Run a finding or a case file again, to see whether it still fails.

    Exit code 0: it does not happen any more; 1: it still happens; 125: it cannot run here.
    """
    given = typed(locals(), "with_", "json")
    restart_with_releases(with_ or ())
    from narrowfuzz.report.replay import ReplayOptions, print_replayed
    from narrowfuzz.report.replay import replay as again

    replayed = run_and_print(json, partial(again, ReplayOptions(**given)), print_replayed, asdict)
    raise typer.Exit(replayed.code)


def explain(
    finding: Annotated[str, typer.Argument(help="A finding's id or folder.")],
    seconds: Annotated[
        float,
        typer.Option(
            help="Time limit for all variations together.",
            show_default="60, or 300 if it is compiled",
        ),
    ] = 0.0,
    recipe_file: Files = None,
    te_version: TeVersion = "",
    with_: With = None,
    model: AboutModel = None,
    plant: PlantAgain = "",
    json: Json = False,
) -> None:
    """Vary a finding: which conditions does it need, and what makes it go away?

    Each variation runs with 20 random seeds.

    Exit code 0: explained; 2: it is not a finding, or does not show here.
    """
    restart_with_releases(with_ or ())
    from narrowfuzz.explain.command import Question, print_explained
    from narrowfuzz.explain.command import explain as of_finding

    question = Question(
        finding, tuple(recipe_file or ()), tuple(model or ()), te_version, plant, seconds
    )
    do = partial(of_finding, question)
    run_and_print(json, do, print_explained, asdict)


def bisect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FINDING|ISSUE|SCRIPT",
            help="A finding's id or folder, a known issue's id, or a script that exits with 1 "
            "while the bug shows and with 0 if it does not.",
        ),
    ],
    package: Annotated[
        str, typer.Option(help="Package to bisect: torch, torchao, transformer_engine, ...")
    ],
    good: Annotated[
        str,
        typer.Option(
            metavar="V",
            help="A release or commit that does not show it, older or newer than --bad. Without "
            "it both the first and the last release that show it are looked for.",
        ),
    ] = "",
    bad: Annotated[
        str,
        typer.Option(
            metavar="V",
            help="A release or commit that shows it.",
            show_default="the installed release",
        ),
    ] = "",
    repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Try the commits of this checkout, not releases."),
    ] = None,
    with_: With = None,
    runs: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="How often the script must pass on a release that is free of it.",
            show_default="1, or 10 if it does not show in every process",
        ),
    ] = 0,
    database: Database = "",
    json: Json = False,
) -> None:
    """Find the first release, or commit, that shows a finding, and the last that does not.

    Exit code 0: found, or every release that runs the script shows it;
    2: wrong options; 125: the script runs on no release.
    """
    from narrowfuzz.bisect.command import Question, bisect_command, print_found

    question = Question(target, package, good, bad, repo, tuple(with_ or ()), runs, database)
    found = run_and_print(json, partial(bisect_command, question), print_found, asdict)
    raise typer.Exit(found.code)


def report(
    finding: Annotated[str, typer.Argument(help="A finding's id or folder.")],
    issue: Annotated[
        bool, typer.Option("--issue", help="As Markdown for the library's issue tracker.")
    ] = False,
) -> None:
    """Print a finding, or a bug report for it."""
    from narrowfuzz.report.issue import report_command

    raise typer.Exit(report_command(finding, issue=issue))
