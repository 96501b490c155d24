"""Options that several commands share, and a helper that collects the typed ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowfuzz.campaign.config import MINUTES
from narrowfuzz.case.arm import COMPILERS

Globs = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="GLOB",
        help="Recipes (conversions), as `list recipes` names them; may repeat.",
    ),
]
Files = Annotated[
    list[Path] | None,
    typer.Option("--recipe-file", help="Also load the recipes (RECIPES) of this Python file."),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu (default), cuda, cuda:N, or simulated: a Hopper GPU emulated on the CPU.",
        show_default=False,
    ),
]
ArmGlobs = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="GLOB",
        help="Ways to run a model, as `list arms` names them (eager, inductor, eager+checkpoint, "
        "...); may repeat.",
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="PACKAGE==V",
        help="Use this release, such as torchao==0.15.0, in place of the installed one; it is "
        "fetched if needed; may repeat.",
    ),
]
COMPILES = f"none, {', '.join(COMPILERS[:-1])} or {COMPILERS[-1]}"
OtherSeed = Annotated[int, typer.Option(help="Seed of the random cases.")]
TeVersion = Annotated[
    str, typer.Option(help="Test this release of TransformerEngine; it is fetched if needed.")
]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="How long to look for bugs; confirming findings takes additional time.",
        show_default=f"{MINUTES:g}, unless --cases is given",
    ),
]
Cases = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Run N cases, however long it takes; the same --seed and --workers repeat them.",
        show_default="by time",
    ),
]
Workers = Annotated[
    int, typer.Option(help="Worker processes; 0 is one per core or GPU.", show_default=True)
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the random cases.", show_default="random"),
]
AboutModel = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="FILE.py:build", help="Your own model, if the finding is about it."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Output folder.", show_default="a new one in reports/runs or narrowfuzz-runs"
    ),
]
FailOn = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        help="Lowest severity that makes the exit code 1: high, medium, low, or suspected (also "
        "what could not be reproduced in a fresh process).",
    ),
]
MinJudged = Annotated[
    float,
    typer.Option(
        metavar="PERCENT",
        help="Exit with 4 if a smaller share was checked of the combinations of recipe, arm and "
        "model that can run on this machine.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Also show how often each rule was applied, and how this machine rounds and adds.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show the result and the findings only.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, all else on stderr.")
]
Plant = Annotated[
    str,
    typer.Option(
        metavar="ID",
        help="Inject this bug, to test whether narrowfuzz finds it: an id of `list faults`, or "
        "FILE:id.",
    ),
]
PlantAgain = Annotated[
    str,
    typer.Option(
        "--plant",
        metavar="ID",
        help="The bug that was injected when it was found (run --plant ID): inject it here, too.",
    ),
]
Baseline = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="RUN", help="Folder of an earlier run, whose findings do not count; may repeat."
    ),
]
Ledgers = Annotated[
    list[Path] | None,
    typer.Option(
        "--ledger", metavar="DIR", help="Folder with known issues of your own; may repeat."
    ),
]
Suppress = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML file of findings that do not count, with reasons."),
]
ModelFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="GLOB",
        help="Models to test, or your own: FILE.py:build, package.module:build; may repeat.",
    ),
]
Database = Annotated[
    str,
    typer.Option(
        metavar="FILE|URL",
        envvar="NARROWFUZZ_DATABASE",
        help="Record findings over many runs here: a file, or a database (postgresql://...).",
        show_default="all-findings.db beside the runs",
    ),
]

Recorded = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="FILE|URL",
        envvar="NARROWFUZZ_DATABASE",
        help="Where runs have recorded the findings that `list findings` reads: a file, or a "
        "database (postgresql://...).",
        show_default="all-findings.db beside the runs",
    ),
]


def typed(options: Mapping[str, Any], *apart: str) -> dict[str, Any]:
    """The typed options, as values for the fields of a record that have the names of a command's
    parameters, without those named in ``apart``. Omitted options keep the record's defaults."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None and name not in apart
    }
