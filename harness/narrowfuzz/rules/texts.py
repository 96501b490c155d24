"""The claim of each rule and why it holds, for ``narrowfuzz rule`` and the tables of the docs.

``python -m narrowfuzz.rules.texts docs`` writes the tables between their markers.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Page = Literal["rules", "sharding", "schedules"]
#: The markers around a table of a page.
_BEGIN, _END = "<!-- rules: {} -->", "<!-- end of rules -->"
_HEADS = {
    "rules": ("rule", "claim", "strength", "precondition"),
    "sharding": ("rule", "what it says", "strength"),
    "schedules": ("rule", "claim on a schedule"),
}


@dataclass(frozen=True)
class Explained:
    """A row of a page: the rules that share one claim."""

    names: tuple[str, ...]
    #: The claim.
    says: str
    #: The title of each rule in lists.
    titles: tuple[str, ...] = ()
    #: Where the rules apply, in a few words.
    needs: str = ""
    page: Page = "rules"
    #: The table of the page that has this row.
    table: str = "models"
    #: The precondition.
    where: str = ""
    #: As the table prints it.
    strength: str = ""
    #: Why it is exact, or what is proven; "" if another row of the same name explains it.
    why: str = ""
    #: What it cannot detect.
    blind: str = ""
    #: Rule -> an injected bug that it catches, or words for one in a user's file.
    caught: dict[str, str] | None = None
    #: The heading on the page under which the rules are explained.
    section: str = ""

    def row(self) -> tuple[str, ...]:
        """The cells of its table."""
        cells = (", ".join(self.names), self.says, self.strength, self.where)
        return tuple(cell.replace("|", "\\|") for cell in cells[: len(_HEADS[self.page])])


@cache
def explained() -> tuple[Explained, ...]:
    """All rows, in the order of ``rules.toml``."""
    text = files(__package__).joinpath("rules.toml").read_text()
    return tuple(_read(record) for record in tomllib.loads(text)["rule"])


def _read(record: dict[str, Any]) -> Explained:
    names, caught = tuple(record["names"]), record.get("caught", {})
    if isinstance(caught, str):
        caught = dict.fromkeys(names, caught)
    titles = tuple(record.get("titles", ()))
    return Explained(**{**record, "names": names, "titles": titles, "caught": caught})


def rows_of(name: str) -> tuple[Explained, ...]:
    """The rows about a rule: first the one that explains why it holds, then those about other kinds
    of case."""
    found = [row for row in explained() if name in row.names]
    return tuple(sorted(found, key=lambda row: not row.why))


def title_of(name: str) -> str:
    """The title of a rule in lists; "" if it has none yet."""
    return next((r.titles[r.names.index(name)] for r in rows_of(name) if r.titles), "")


def needs_of(name: str) -> str:
    """Where a rule applies, in a few words; "none" if nothing is required."""
    return next((row.needs for row in rows_of(name) if row.needs), "none")


def table(page: Page, which: str = "models") -> str:
    """A table of a page, as Markdown."""
    head = _HEADS[page]
    rows = [row.row() for row in explained() if (row.page, row.table) == (page, which)]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pages() -> Iterator[tuple[Page, str]]:
    """The page and the name of each table."""
    yield from dict.fromkeys((row.page, row.table) for row in explained())


def with_tables(page: Page, text: str) -> str:
    """The text of a page with its tables as they should be. Raises ValueError where a marker is
    missing."""
    for owner, which in pages():
        if owner != page:
            continue
        begin = _BEGIN.format(which)
        if text.count(begin) != 1:
            raise ValueError(f"docs/{page}.md needs the line {begin!r} once")
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition(_END)
        if not end:
            raise ValueError(f"docs/{page}.md needs the line {_END!r} behind {begin!r}")
        text = f"{before}{begin}\n\n{table(page, which)}\n\n{_END}{after}"
    return text


def main(folder: Path) -> None:
    """Write the tables of every page in the folder."""
    for page in dict.fromkeys(owner for owner, _ in pages()):
        path = folder / f"{page}.md"
        path.write_text(with_tables(page, path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
