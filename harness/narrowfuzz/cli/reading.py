"""Commands that list and explain what narrowfuzz has, and report what cannot run here."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from narrowfuzz.cli.options import ArmGlobs, Files, Globs, Json, Recorded
from narrowfuzz.ledger.exits import CLEAN, USAGE
from narrowfuzz.report.document import run_and_print


def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="recipes, models, operators, arms, rules, known, findings, faults, controls or "
            "coverage.",
        ),
    ],
    recipe: Globs = None,
    arm: ArmGlobs = None,
    recipe_file: Files = None,
    database: Recorded = "",
    json: Json = False,
) -> None:
    """List recipes, models, arms (ways to run a model), rules, known issues and more.

    findings: what all runs found, when and with which versions, and what is
    fixed. --recipe and --arm select findings, or the known issues that may
    affect that configuration.
    """
    from narrowfuzz.report.listing import ListingOptions, listed, print_listing

    options = ListingOptions(
        tuple(recipe_file or ()), tuple(recipe or ()), tuple(arm or ()), database
    )
    run_and_print(
        json, partial(listed, what, options), print_listing, lambda listing: listing.records
    )


def known(
    id: Annotated[str, typer.Argument(help="A known issue, as `narrowfuzz list known` names it.")],
    issue: Annotated[
        bool, typer.Option("--issue", help="Print a bug report for the library's issue tracker.")
    ] = False,
) -> None:
    """Explain a known issue: what happens, what was expected, workarounds, its script."""
    from narrowfuzz.report.listing import known_command

    known_command(id, issue=issue)


def rule(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="A rule, as a finding names it; none lists all.")
    ] = "",
) -> None:
    """Explain a rule: what it claims, why it can be trusted, what it cannot see."""
    from narrowfuzz.report.rule import rule_command

    rule_command(name)


def doctor(json: Json = False) -> None:
    """Show versions, hardware and compilers, and what cannot run here and why."""
    from narrowfuzz.report.doctor import examine, print_report

    report = run_and_print(json, examine, print_report, lambda report: report)
    raise typer.Exit(USAGE if report["problems"] else CLEAN)
