"""The terminal that commands print to: lines are not wrapped, tables use the whole width."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def console(*, markup: bool = True, quiet: bool = False, width: int = 110) -> Console:
    """A console as wide as the terminal, or ``width`` characters if the output is no terminal."""
    return Console(
        highlight=False,
        markup=markup,
        emoji=False,  # ``mine.py:loop:`` names a model
        quiet=quiet,
        soft_wrap=True,
        width=None if sys.stdout.isatty() else width,
    )


def print_table(table: Table, sentence: str = "") -> None:
    """Print a wide table, then a sentence that explains it."""
    page = console(markup=False, width=160)
    page.print(table, soft_wrap=False)
    if sentence:
        page.print(f"\n{sentence}")
