"""The command line. Heavy imports happen inside the commands: --help must not load torch."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import typer
from typer.exceptions import TyperException

from narrowfuzz.case.arm import COMPILERS
from narrowfuzz.ledger.exits import CLEAN, INTERRUPTED, OURS, USAGE
from narrowfuzz.machine.overlay import lay
from narrowfuzz.recipe.deprecated import Deprecated
from narrowfuzz.report.document import aside, write_document
from narrowfuzz.trace import words

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Find numerical bugs in FP8, MXFP8 and NVFP4 training before they spoil a long run.",
)


def _say_version(asked: bool) -> None:
    if asked:
        from narrowfuzz import __version__

        print(f"narrowfuzz {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Find numerical bugs in FP8, MXFP8 and NVFP4 training before they spoil a long run."""


Globs = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="GLOB",
        help="Recipes (conversions), as `list recipes` names them; may repeat.",
    ),
]
OwnGlobs = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="GLOB",
        help="The recipe (conversion) that you train with, as `list recipes` names it; may repeat. "
        "Without this option nothing is converted.",
        show_default="torch.DTYPE, the dtype of the model's weights",
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
        show_default="2, unless --cases is given",
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
    typer.Option(metavar="FILE.py:build", help="Your own model, if the finding is about it."),
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
OperatorGlobs = Annotated[
    list[str] | None,
    typer.Option(
        "--operator",
        metavar="GLOB",
        help="Operators of PyTorch to test by themselves, as `list operators` names them: "
        "attention, 'layer_norm*'; may repeat.",
    ),
]

T = TypeVar("T")


def _given(options: Mapping[str, Any], *apart: str) -> dict[str, Any]:
    """What was typed, for the fields of a record that are called like a command's parameters: all
    but what stands ``apart``. What was left out is the record's to decide."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None and name not in apart
    }


def _told(
    json: bool, do: Callable[[], T], tell: Callable[[T], None], plain: Callable[[T], Any]
) -> T:
    """``do`` it, and say what came of it: to people, or as ``plain`` data."""
    with aside() if json else nullcontext():
        done = do()
    if json:
        write_document(plain(done))
    else:
        tell(done)
    return done


def _start_early(device: str, plant: str) -> None:
    from narrowfuzz.campaign.server import start_early

    start_early(device or "cpu", plant)


def _ended(json: bool, do: Callable[[], tuple[int, dict[str, Any]]]) -> int:
    """The exit code of a campaign; the campaign itself tells people how it goes."""
    return _told(json, do, lambda ended: None, lambda ended: ended[1])[0]


@app.command()
def run(
    minutes: Minutes = None,
    cases: Cases = 0,
    workers: Workers = 0,
    recipes: Globs = None,
    recipe_files: Files = None,
    arms: ArmGlobs = None,
    models: ModelFiles = None,
    operators: OperatorGlobs = None,
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
    given = _given(locals(), "no_ledger", "with_", "json")
    lay(with_ or ())
    if not te_version:  # it is chosen first
        _start_early(device, plant)
    from narrowfuzz.campaign.asked import Asked
    from narrowfuzz.campaign.main import run_command

    asked = Asked(**given, ledger=not no_ledger)
    raise typer.Exit(_ended(json, partial(run_command, asked)))


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:build",
            help="A function that returns your module and its example inputs; or "
            "package.module:build.",
        ),
    ],
    recipes: OwnGlobs = None,
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
    given = _given(locals(), "model", "compile", "checkpoint", "only", "with_", "json")
    lay(with_ or ())
    _start_early(device, plant)
    from narrowfuzz.campaign.asked import Asked
    from narrowfuzz.campaign.check import check_command

    asked = Asked(**given, models=(model,))
    do = partial(check_command, asked, compile, checkpoint, tuple(only or ()))
    raise typer.Exit(_ended(json, do))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def watch(
    command: Annotated[
        list[str], typer.Argument(help="Your training command, behind --; torchrun works, too.")
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Output folder of an earlier --full run; report the first difference from it.",
        ),
    ] = None,
    fail: Annotated[
        bool,
        typer.Option(
            "--fail", help="Exit with 1 if there is a finding though the command exits with 0."
        ),
    ] = False,
    out: Out = None,
    full: Annotated[
        bool, typer.Option("--full", help="Record a digest of every tensor, for --against; slow.")
    ] = False,
    repeat: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="After a bad value rerun up to N times, to see whether it comes at the same "
            "place; with --full also if nothing was bad.",
        ),
    ] = 0,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove",
            help="After a finding rerun with compile, checkpointing, ... disabled one at a time.",
        ),
    ] = False,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="ARGS",
            help="After a finding rerun with these arguments added, or with the environment "
            "variable NAME=VALUE; may repeat.",
        ),
    ] = None,
) -> None:
    """Find the first NaN or infinity of a training: step, module, operator, rank, collective.

    The output and the exit code of your command pass through.
    """
    given = _given(locals())
    from narrowfuzz_watch.command import Asked, watch_command

    raise typer.Exit(watch_command(Asked(**given)))


@app.command()
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
    from narrowfuzz.campaign.compare import Asked, compare_command

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
    asked = Asked(out=out, cases=cases, seed=seed, workers=workers, more=more, accepting=accepting)
    raise typer.Exit(_ended(json, partial(compare_command, first, second, asked)))


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="A finding's id or folder, or a case file.")],
    arm: ArmGlobs = None,
    recipe_file: Files = None,
    te_version: TeVersion = "",
    with_: With = None,
    device: Annotated[
        str, typer.Option(help="Device to use.", show_default="where it was found")
    ] = "",
    model: AboutModel = None,
    database: Database = "",
    json: Json = False,
) -> None:
    """Run a finding or a case file again, to see whether it still fails.

    Exit code 0: it does not happen any more; 1: it still happens; 125: it cannot run here.
    """
    lay(with_ or ())
    from narrowfuzz.report.replay import print_replayed
    from narrowfuzz.report.replay import replay as again

    do = partial(
        again,
        case,
        tuple(arm or ()),
        tuple(recipe_file or ()),
        te_version,
        device,
        tuple(model or ()),
        database,
    )
    raise typer.Exit(_told(json, do, print_replayed, asdict).code)


@app.command()
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
    plant: Plant = "",
    json: Json = False,
) -> None:
    """Vary a finding: which conditions does it need, and what makes it go away?

    Each variation runs with 20 random seeds.

    Exit code 0: explained; 2: it is no finding, or does not show here.
    """
    lay(with_ or ())
    from narrowfuzz.explain.command import Question, print_explained
    from narrowfuzz.explain.command import explain as of_finding

    question = Question(
        finding, tuple(recipe_file or ()), tuple(model or ()), te_version, plant, seconds
    )
    do = partial(of_finding, question)
    _told(json, do, print_explained, asdict)


@app.command()
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
    found = _told(json, partial(bisect_command, question), print_found, asdict)
    raise typer.Exit(found.code)


@app.command()
def report(
    finding: Annotated[str, typer.Argument(help="A finding's id or folder.")],
    issue: Annotated[
        bool, typer.Option("--issue", help="As Markdown for the library's issue tracker.")
    ] = False,
) -> None:
    """Print a finding, or a bug report for it."""
    from narrowfuzz.report.issue import report_command

    raise typer.Exit(report_command(finding, issue=issue))


@app.command()
def score(
    faults: Annotated[
        list[Path] | None,
        typer.Option("--faults", help="Python file of your own with bugs to inject (PLANTS)."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GLOB", help="Only these bugs and controls, by id."),
    ] = None,
    no_builtin: Annotated[
        bool, typer.Option("--no-builtin", help="Leave out the bugs that come with narrowfuzz.")
    ] = False,
    no_controls: Annotated[
        bool, typer.Option("--no-controls", help="Leave out the controls (code without a bug).")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            help="How long to look for each bug; 10 times as long if only compiled runs have it."
        ),
    ] = 60.0,
    cases: Annotated[
        int,
        typer.Option(metavar="N", help="Look for each bug in N cases.", show_default="by time"),
    ] = 0,
    control_cases: Annotated[int, typer.Option(metavar="N", help="Cases for each control.")] = 500,
    workers: Annotated[int, typer.Option(help="Worker processes; 0 is one per core.")] = 0,
    seed: OtherSeed = 0,
    arm: ArmGlobs = None,
    with_: With = None,
    device: DeviceName = "cpu",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result to this file, as JSON.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with this earlier result.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the result in --json.")
    ] = False,
) -> None:
    """Measure narrowfuzz itself: which injected bugs it finds, and where it raises false alarms.

    False alarms are findings on controls, which have no bug.

    Exit code 1: fewer bugs were found than before, or there was a false alarm.
    """
    lay(with_ or ())
    from narrowfuzz.power.hunt import Limits
    from narrowfuzz.power.score import Asked, score_command

    asked = Asked(
        files=tuple(faults or ()),
        only=tuple(only or ()),
        builtin=not no_builtin,
        controls=not no_controls,
        workers=workers,
        device=device,
        out=json,
        against=against,
        resume=resume,
        limits=Limits(seconds, cases, control_cases, seed, tuple(arm or ())),
    )
    raise typer.Exit(score_command(asked))


@app.command()
def vacuity(
    cases: Annotated[int, typer.Option(metavar="N", help="Cases for each recipe.")] = 40,
    recipe: Globs = None,
    compile: Annotated[str, typer.Option(help=f"{COMPILES.capitalize()}.")] = "none",
    device: DeviceName = "cpu",
    seed: OtherSeed = 0,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table with examples to this file, as JSON."),
    ] = None,
) -> None:
    """Mutation-test the checks that passed, to find those that could not have failed."""
    from narrowfuzz.machine.environment import prepare

    prepare()  # before torch is imported
    from narrowfuzz.power.vacuity import vacuity_command

    vacuity_command(tuple(recipe or ()), cases, seed, compile, device, json)


@app.command("list")
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
    database: Database = "",
    json: Json = False,
) -> None:
    """List recipes, models, arms (ways to run a model), rules, known issues and more.

    findings: what all runs found, when and with which versions, and what is
    fixed. --recipe and --arm select findings, or the known issues that may
    affect that configuration.
    """
    from narrowfuzz.report.listing import Asked, listed, print_listing

    asked = Asked(tuple(recipe_file or ()), tuple(recipe or ()), tuple(arm or ()), database)
    _told(json, partial(listed, what, asked), print_listing, lambda listing: listing.records)


@app.command()
def known(
    id: Annotated[str, typer.Argument(help="A known issue, as `narrowfuzz list known` names it.")],
    issue: Annotated[
        bool, typer.Option("--issue", help="Print a bug report for the library's issue tracker.")
    ] = False,
) -> None:
    """Explain a known issue: what happens, what was expected, workarounds, its script."""
    from narrowfuzz.report.listing import known_command

    known_command(id, issue=issue)


@app.command()
def rule(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="A rule, as a finding names it; none lists all.")
    ] = "",
) -> None:
    """Explain a rule: what it claims, why it can be trusted, what it cannot see."""
    from narrowfuzz.report.rule import rule_command

    rule_command(name)


@app.command()
def invariance(
    recipe: Globs = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Which of linear, attention, layer_norm, rms_norm, softmax, log_softmax, sum, "
            "silu and gelu; may repeat.",
        ),
    ] = None,
    arm: Annotated[
        str, typer.Option(metavar="ARM", help="One way to run them, as `list arms` names it.")
    ] = "eager",
    device: DeviceName = "cpu",
    recipe_file: Files = None,
    json: Json = False,
) -> None:
    """Show which operators are batch-invariant: a row gives the same bits alone as in a batch.

    Where they are not, that is no bug: PyTorch promises it for no operator.
    """
    from narrowfuzz.power.invariance import asked, print_table

    do = partial(asked, recipe or (), operator or (), arm, device, recipe_file or ())
    _told(json, do, print_table, lambda rows: [asdict(row) for row in rows])


@app.command()
def bounds(
    operator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Only these operators, as findings name them (attention_backward); may repeat.",
        ),
    ] = None,
    cases: Annotated[
        int, typer.Option(metavar="N", help="Cases of each model, in fp32 and in bf16.")
    ] = 24,
    calls: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="More cases, until each result of an operator was measured in this many calls.",
        ),
    ] = 0,
    device: DeviceName = "cpu",
    seed: OtherSeed = 0,
    json: Json = False,
) -> None:
    """Measure how much of its allowed error each operator of PyTorch uses.

    A bound much wider than the errors detects little. A result outside of its
    bound means that the bound is wrong, or that PyTorch has a bug (it may be a
    known issue).
    """
    from narrowfuzz.machine.environment import prepare

    prepare()  # before torch is imported
    from narrowfuzz.power.tightness import Asked, answered, print_table

    do = partial(answered, Asked(operator or (), cases, calls, device, seed))
    _told(json, do, print_table, lambda rows: [asdict(row) for row in rows])


@app.command()
def doctor(json: Json = False) -> None:
    """Show versions, hardware and compilers, and what cannot run here and why."""
    from narrowfuzz.report.doctor import examine, print_report

    report = _told(json, examine, print_report, lambda report: report)
    raise typer.Exit(USAGE if report["problems"] else CLEAN)


def main(argv: list[str] | None = None) -> None:
    """Entry point. A user's mistake is one sentence on stderr and exit code 2, one of ours is a
    traceback and 3."""
    try:
        with _old_names():
            code: Any = app(args=argv, standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        sys.exit(INTERRUPTED)
    except TyperException as error:
        if not error.format_message():  # no arguments: the help has been shown
            sys.exit(USAGE)
        _refuse(error.format_message())
    except ValueError as error:
        _refuse(str(error))
    except (BrokenPipeError, SystemExit) as error:
        if not isinstance(error.__context__ or error, BrokenPipeError):  # rich raises SystemExit(1)
            raise
        # whoever read the output has gone; what is left of it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OURS)
    except Exception:
        traceback.print_exc()
        sys.exit(OURS)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _old_names() -> Iterator[None]:
    """Python shows what is deprecated to few: whoever runs a command is told of each old name."""
    shown: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, Deprecated):
            others(message, category, filename, lineno, file, line)
        elif str(message) not in shown:
            shown.add(str(message))
            print(f"narrowfuzz: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        others = warnings.showwarning
        warnings.showwarning = show
        warnings.simplefilter("always", Deprecated)
        yield


def _refuse(sentence: str) -> None:
    print(f"narrowfuzz: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(USAGE)


if __name__ == "__main__":
    main()
