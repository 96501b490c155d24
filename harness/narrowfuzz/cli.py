"""The command line. Heavy imports happen inside the commands: --help must not load torch."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.exceptions import TyperException

from narrowfuzz.document import aside, write_document
from narrowfuzz.exits import CLEAN, INTERRUPTED, OURS, USAGE
from narrowfuzz.overlay import lay

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Find numerical bugs of narrow-precision training before a long run dies of them.",
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
        typer.Option("--version", callback=_say_version, is_eager=True, help="say it and leave"),
    ] = False,
) -> None:
    """Find numerical bugs of narrow-precision training before a long run dies of them."""


Globs = Annotated[list[str] | None, typer.Option("--recipe", help="recipes to test (glob)")]
Files = Annotated[list[Path] | None, typer.Option("--recipe-file", help="file defining RECIPES")]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device", help="cpu, the default; cuda, cuda:N, or simulated: a Hopper on the CPU"
    ),
]
ArmGlobs = Annotated[list[str] | None, typer.Option("--arm", help="arms to run (glob)")]

With = Annotated[
    list[str] | None,
    typer.Option("--with", help="another release of a library under this torch: torchao==0.15.0"),
]
TeVersion = Annotated[str, typer.Option(help="TransformerEngine to test, installed on demand")]


Minutes = Annotated[
    float | None, typer.Option(help="how long to look for findings; 2 if nothing is given")
]
Cases = Annotated[
    int, typer.Option(help="how many cases instead: the same with the same seed and workers")
]
Workers = Annotated[int, typer.Option(help="worker processes; 0: one per core or GPU")]
Seed = Annotated[int | None, typer.Option(help="reproduce a campaign's draws")]
Out = Annotated[Path | None, typer.Option(help="output folder")]
FailOn = Annotated[
    str, typer.Option(help="what exit code 1 says: high, medium, low or suspected, or worse")
]
MinJudged = Annotated[
    float, typer.Option(help="exit 4 if less of what can run here was judged, in per cent")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="tables of rules and pairs, too")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="the verdict and the findings only")]
Json = Annotated[
    bool, typer.Option("--json", help="one JSON document on stdout; all else goes to stderr")
]
Plant = Annotated[str, typer.Option(help="plant this (id or FILE:id)")]
Baseline = Annotated[
    list[Path] | None,
    typer.Option(help="folders of earlier runs: what any of them has seen does not count"),
]
Ledgers = Annotated[
    list[Path] | None, typer.Option("--ledger", help="folder of known divergences of your own")
]
Suppress = Annotated[
    Path | None, typer.Option(help="TOML file of accepted findings, with reasons and dates")
]
ModelFiles = Annotated[
    list[str] | None,
    typer.Option("--model", help="models (glob), or your own: FILE.py:build, package.module:build"),
]

T = TypeVar("T")


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


def _ended(json: bool, do: Callable[[], tuple[int, dict[str, Any]]]) -> int:
    """The exit code of a campaign; the campaign itself tells people how it goes."""
    return _told(json, do, lambda ended: None, lambda ended: ended[1])[0]


@app.command()
def run(
    minutes: Minutes = None,
    cases: Cases = 0,
    workers: Workers = 0,
    recipe: Globs = None,
    recipe_file: Files = None,
    arm: ArmGlobs = None,
    model: ModelFiles = None,
    device: DeviceName = "",
    seed: Seed = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option(help="go on in --out")] = False,
    ledger: Ledgers = None,
    no_ledger: Annotated[bool, typer.Option(help="treat known divergences as new")] = False,
    plant: Plant = "",
    te_version: TeVersion = "",
    with_: With = None,
    fail_on: FailOn = "low",
    min_judged: MinJudged = 0.0,
    baseline: Baseline = None,
    suppress: Suppress = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """A campaign: draw, judge, minimise, verify. Exit 0: nothing new, 1: new findings, 3: not
    complete, 4: less judged than asked."""
    lay(with_ or ())
    from narrowfuzz.campaign.asked import Asked
    from narrowfuzz.campaign.main import run_command

    asked = Asked(
        minutes=minutes, cases=cases, workers=workers, recipes=tuple(recipe or ()),
        recipe_files=tuple(recipe_file or ()), arms=tuple(arm or ()), models=tuple(model or ()),
        device=device, seed=seed, out=out, resume=resume, ledger=not no_ledger,
        ledgers=tuple(ledger or ()), plant=plant,
        te_version=te_version, fail_on=fail_on, min_judged=min_judged,
        baseline=tuple(baseline or ()), suppress=suppress, verbose=verbose, quiet=quiet,
    )  # fmt: skip
    raise typer.Exit(_ended(json, partial(run_command, asked)))


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="your model: FILE.py:build, package.module:build")],
    recipe: Globs = None,
    recipe_file: Files = None,
    compile: Annotated[
        str, typer.Option(help="none, aot_eager, aot_eager_decomp_partition or inductor")
    ] = "none",
    checkpoint: Annotated[
        str, typer.Option(help="how you recompute: none, full, reentrant or selective")
    ] = "none",
    arm: ArmGlobs = None,
    minutes: Minutes = None,
    cases: Cases = 0,
    workers: Workers = 0,
    device: DeviceName = "",
    seed: Seed = None,
    out: Out = None,
    fail_on: FailOn = "low",
    min_judged: MinJudged = 100.0,
    ledger: Ledgers = None,
    baseline: Baseline = None,
    suppress: Suppress = None,
    plant: Plant = "",
    with_: With = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--filter", help="linears to convert, by name (glob); !GLOB leaves out"),
    ] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Your own model in your own configuration: is it sound, and what was judged? BUILD returns
    the module and what it is called with. Exit codes as of run."""
    lay(with_ or ())
    from narrowfuzz.campaign.asked import Asked
    from narrowfuzz.campaign.check import check_command

    asked = Asked(
        minutes=minutes, cases=cases, workers=workers, recipes=tuple(recipe or ()),
        recipe_files=tuple(recipe_file or ()), arms=tuple(arm or ()), models=(model,),
        device=device, seed=seed, out=out,
        fail_on=fail_on, min_judged=min_judged, ledgers=tuple(ledger or ()),
        baseline=tuple(baseline or ()), suppress=suppress,
        plant=plant, verbose=verbose, quiet=quiet,
    )  # fmt: skip
    do = partial(check_command, asked, compile, checkpoint, tuple(only or ()))
    raise typer.Exit(_ended(json, do))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def watch(
    command: Annotated[list[str], typer.Argument(help="after --: what trains, torchrun too")],
    against: Annotated[
        Path | None, typer.Option(help="folder of a run recorded with --full: where do they part?")
    ] = None,
    fail: Annotated[
        bool, typer.Option("--fail", help="exit 1 if a bad value was found and the command gave 0")
    ] = False,
    out: Out = None,
    full: Annotated[
        bool, typer.Option("--full", help="record a digest of all that is read and made; slow")
    ] = False,
    repeat: Annotated[int, typer.Option(help="run the command so many times more, if need be")] = 0,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="then run it without compiling, checkpointing, ...: is it gone?"
        ),
    ] = False,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="then run it with these arguments, too, or NAME=VALUE; may repeat"),
    ] = None,
) -> None:
    """The first bad value of a real training: step, module, operator, rank, collective. The
    command's output and exit code pass through."""
    from narrowfuzz.watch.command import Asked, watch_command

    asked = Asked(
        tuple(command), against=against, fail=fail, out=out, full=full, repeat=repeat,
        remove=remove, variants=tuple(variant or ()),
    )  # fmt: skip
    raise typer.Exit(watch_command(asked))


@app.command()
def compare(
    first: Annotated[
        str,
        typer.Argument(help="a Python, an environment, a folder of packages, or torchao==0.17.0"),
    ],
    second: Annotated[str, typer.Argument(help="the same of the other side")],
    out: Annotated[Path, typer.Option(help="output folder, with one run for each side")],
    cases: Annotated[int, typer.Option(help="how many cases each side judges")] = 500,
    seed: Annotated[int, typer.Option(help="which cases are drawn")] = 1,
    workers: Workers = 1,
    recipe: Globs = None,
    arm: ArmGlobs = None,
    model: ModelFiles = None,
) -> None:
    """The same cases on two installations. Exit 0: both show the same, 1: they differ, 3: a run
    did not come to its end."""
    from narrowfuzz.campaign.compare import compare_command

    given = {"--recipe": recipe, "--arm": arm, "--model": model}
    more = [text for name, values in given.items() for v in values or () for text in (name, v)]
    raise typer.Exit(
        compare_command(
            first, second, cases=cases, seed=seed, workers=workers, out=out, more=more
        )
    )  # fmt: skip


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="case file, finding folder, or finding id")],
    arm: ArmGlobs = None,
    recipe_file: Files = None,
    te_version: TeVersion = "",
    with_: With = None,
    device: Annotated[str, typer.Option(help="where; left out: where the finding was seen")] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="your own model that it is about: FILE.py:build")
    ] = None,
    json: Json = False,
) -> None:
    """Run one case again. Exit 0: fixed or sound, 1: still failing, 125: cannot tell here."""
    lay(with_ or ())
    from narrowfuzz.replay import print_replayed
    from narrowfuzz.replay import replay as again

    do = partial(
        again, case, tuple(arm or ()), tuple(recipe_file or ()), te_version, device,
        tuple(model or ()),
    )  # fmt: skip
    raise typer.Exit(_told(json, do, print_replayed, asdict).code)


@app.command()
def report(
    finding: Annotated[str, typer.Argument(help="finding folder, or finding id")],
    issue: Annotated[
        bool, typer.Option("--issue", help="as Markdown for the library's issue tracker")
    ] = False,
) -> None:
    """A kept finding again, or the text that its library's maintainers would like to get."""
    from narrowfuzz.issue import report_command

    raise typer.Exit(report_command(finding, issue=issue))


@app.command()
def score(
    faults: Annotated[
        list[Path] | None, typer.Option("--faults", help="file defining PLANTS")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="faults and controls by id (glob)")
    ] = None,
    no_builtin: Annotated[bool, typer.Option(help="leave out the shipped faults")] = False,
    no_controls: Annotated[bool, typer.Option(help="leave out the clean controls")] = False,
    seconds: Annotated[float, typer.Option(help="budget of a hunt; 10 times for compiled")] = 60.0,
    cases: Annotated[int, typer.Option(help="end a hunt after so many cases; 0: by time")] = 0,
    control_cases: Annotated[int, typer.Option(help="cases of each control")] = 500,
    workers: Annotated[int, typer.Option(help="hunts at a time; 0: one per core")] = 0,
    seed: Annotated[int, typer.Option(help="which cases are drawn")] = 0,
    arm: ArmGlobs = None,
    device: DeviceName = "cpu",
    json: Annotated[Path | None, typer.Option(help="write the result here")] = None,
    against: Annotated[Path | None, typer.Option(help="an earlier result to compare with")] = None,
) -> None:
    """Hunt planted faults, run clean controls. Exit 1: recall lost or a false alarm."""
    from narrowfuzz.power.hunt import Limits
    from narrowfuzz.power.score import Asked, score_command

    asked = Asked(
        files=tuple(faults or ()), only=tuple(only or ()), builtin=not no_builtin,
        controls=not no_controls, workers=workers, device=device, out=json, against=against,
        limits=Limits(seconds, cases, control_cases, seed, tuple(arm or ())),
    )  # fmt: skip
    raise typer.Exit(score_command(asked))


@app.command()
def vacuity(
    cases: Annotated[int, typer.Option(help="cases of each recipe")] = 40,
    recipe: Globs = None,
    compile: Annotated[str, typer.Option(help="none, or what compiles them")] = "none",
    device: DeviceName = "cpu",
    seed: Annotated[int, typer.Option(help="which cases are drawn")] = 0,
    json: Annotated[Path | None, typer.Option(help="write the table with examples here")] = None,
) -> None:
    """Falsify what passing rules looked at: which passes could not have failed?"""
    from narrowfuzz.environment import prepare

    prepare()  # before torch is imported
    from narrowfuzz.power.vacuity import vacuity_command

    vacuity_command(tuple(recipe or ()), cases, seed, compile, device, json)


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(help="recipes, models, arms, oracles, faults, controls, known or coverage"),
    ],
    recipe: Globs = None,
    arm: ArmGlobs = None,
    recipe_file: Files = None,
    json: Json = False,
) -> None:
    """Show what there is; of what is known, what the recipes may show on the arms."""
    from narrowfuzz.listing import listed, print_listing

    do = partial(listed, what, tuple(recipe_file or ()), tuple(recipe or ()), tuple(arm or ()))
    _told(json, do, print_listing, lambda listing: listing.records)


@app.command()
def known(
    id: Annotated[str, typer.Argument(help="an entry, as `narrowfuzz list known` names it")],
    issue: Annotated[
        bool, typer.Option("--issue", help="as Markdown for the library's issue tracker")
    ] = False,
) -> None:
    """Show one known divergence: what happens, what is expected, what helps, its script."""
    from narrowfuzz.listing import known_command

    known_command(id, issue=issue)


@app.command()
def doctor(json: Json = False) -> None:
    """Check this machine: versions, cast policies, compilers, and what cannot run and why."""
    from narrowfuzz.doctor import examine, print_report

    report = _told(json, examine, print_report, lambda report: report)
    raise typer.Exit(USAGE if report["problems"] else CLEAN)


def main(argv: list[str] | None = None) -> None:
    """Entry point. A user's mistake is one sentence on stderr and exit code 2, one of ours is a
    traceback and 3."""
    try:
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


def _refuse(sentence: str) -> None:
    print(f"narrowfuzz: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(USAGE)


if __name__ == "__main__":
    main()
