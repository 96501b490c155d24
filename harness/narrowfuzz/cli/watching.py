"""The command that watches a user's own training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowfuzz.cli.options import Out, typed

#: Options after the watched command belong to that command.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


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
    given = typed(locals())
    from narrowfuzz_watch.command import WatchOptions, watch_command

    raise typer.Exit(watch_command(WatchOptions(**given)))
