"""Commands that measure narrowfuzz itself, and properties of torch's operators."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from narrowfuzz.cli.options import (
    COMPILES,
    ArmGlobs,
    DeviceName,
    Files,
    Globs,
    Json,
    OtherSeed,
    With,
)
from narrowfuzz.machine.overlay import restart_with_releases
from narrowfuzz.report.document import run_and_print


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
    restart_with_releases(with_ or ())
    from narrowfuzz.power.hunt import Limits
    from narrowfuzz.power.score import ScoreOptions, score_command

    options = ScoreOptions(
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
    raise typer.Exit(score_command(options))


def vacuity(
    cases: Annotated[int, typer.Option(metavar="N", help="Cases for each recipe.")] = 40,
    recipe: Globs = None,
    compile: Annotated[str, typer.Option(help=f"How to compile: {COMPILES}.")] = "none",
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
    from narrowfuzz.power.invariance import measure_requested, print_table

    do = partial(measure_requested, recipe or (), operator or (), arm, device, recipe_file or ())
    run_and_print(json, do, print_table, lambda rows: [asdict(row) for row in rows])


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
    bound means that the bound is wrong, or that PyTorch has a bug (perhaps a known
    issue).
    """
    from narrowfuzz.machine.environment import prepare

    prepare()  # before torch is imported
    from narrowfuzz.power.tightness import TightnessOptions, measure_requested, print_table

    do = partial(measure_requested, TightnessOptions(operator or (), cases, calls, device, seed))
    run_and_print(json, do, print_table, lambda rows: [asdict(row) for row in rows])
