"""The terminal that commands print to: no line is wrapped, tables are as wide as there is room."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def console(*, markup: bool = True, quiet: bool = False, width: int = 110) -> Console:
    """As wide as the terminal, or so many characters where there is none."""
    return Console(
        highlight=False,
        markup=markup,
        quiet=quiet,
        soft_wrap=True,
        width=None if sys.stdout.isatty() else width,
    )


def print_table(table: Table, sentence: str = "") -> None:
    """A wide one, and what it means."""
    page = console(markup=False, width=160)
    page.print(table, soft_wrap=False)
    if sentence:
        page.print(f"\n{sentence}")
