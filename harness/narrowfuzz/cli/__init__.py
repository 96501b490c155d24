"""The command line. Heavy imports happen inside the commands: --help must not load torch."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer
from typer.exceptions import TyperException

from narrowfuzz.cli import findings, fuzzing, measuring, reading, watching
from narrowfuzz.ledger.exits import INTERRUPTED, OURS, USAGE
from narrowfuzz.recipe.deprecated import Deprecated

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
def _narrowfuzz(
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


# in the order of --help
app.command()(fuzzing.run)
app.command()(fuzzing.check)
app.command(context_settings=watching.SETTINGS)(watching.watch)
app.command()(fuzzing.compare)
app.command()(findings.replay)
app.command()(findings.explain)
app.command()(findings.bisect)
app.command()(findings.report)
app.command()(measuring.score)
app.command()(measuring.vacuity)
app.command("list")(reading.list_)
app.command()(reading.known)
app.command()(reading.rule)
app.command()(measuring.invariance)
app.command()(measuring.bounds)
app.command()(reading.doctor)


def main(argv: list[str] | None = None) -> None:
    """Entry point. A user's mistake gives one sentence on stderr and exit code 2, an error in
    narrowfuzz a traceback and exit code 3."""
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
        # the reader of the output has gone; the rest of it is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OURS)
    except Exception:
        traceback.print_exc()
        sys.exit(OURS)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _old_names() -> Iterator[None]:
    """Print each use of a deprecated name once: Python hides most deprecation warnings."""
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
