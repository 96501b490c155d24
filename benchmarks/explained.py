"""``make explained``: does ``narrowfuzz explain`` say the right thing of findings whose cause is
known?

Each row of benchmarks/explained.toml names a planted fault or a known issue, a search that finds
it, and what is true of it, written by hand. A finding of the search is explained, within the time
that ``explain`` takes by default, and the answer compared. A folder that already holds a search is
read instead of a new one. ``--write`` renews these rows of docs/explained.md. Exit code 0: every
answer is right; 1: one is not, or something was not found.

    python benchmarks/explained.py cast-truncates mx-byte0-rceil --out reports/runs/explained
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from narrowfuzz.report.explanation import FILE, Answer, Explained, load
from narrowfuzz.report.markdown import plain

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "explained.md"
BEGIN, END = "<!-- table: make explained -->", "<!-- end of table -->"


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the file. Every list holds beginnings of answers."""

    name: str
    #: Options of ``narrowfuzz run``.
    search: list[str]
    #: Is a fault planted, or is it a known issue of the library?
    planted: bool = False
    #: All that it needs of its case, and all that makes it go away.
    needs: list[str] = []
    cured: list[str] = []
    #: What it is about, and with what nothing of the kind is left to judge.
    about: list[str] = []
    avoided: list[str] = []
    #: Something that it does not need, or that leaves it, and must be among the answers.
    without: list[str] = []
    stays: list[str] = []
    #: Part of the sentence on where inside the compiler it starts.
    compiler: str = ""
    #: Part of the sentence of the finding, where a search has several.
    sentence: str = ""
    te_version: str = ""
    #: A flag of /proc/cpuinfo without which it does not show.
    cpu: str = ""


@dataclass(frozen=True)
class Row:
    """What was found and explained of one row."""

    expected: Expected
    #: Seconds that the explanation took.
    seconds: float = 0.0
    explained: Explained | None = None
    #: Why there is nothing to compare.
    missing: str = ""

    @property
    def wrong(self) -> list[str]:
        """How the answer differs from what is expected; empty if it is right."""
        found, expected = self.explained, self.expected
        if found is None:
            return []
        return [
            *_unlike("needs", expected.needs, found.needs, "needed"),
            *_unlike("goes away with", expected.cured, found.switches, "needed"),
            *_unlike("is about", expected.about, found.needs, "nothing judged"),
            *_unlike("is avoided by", expected.avoided, found.switches, "nothing judged"),
            *_lacking("does not need", expected.without, found.needs, "not needed"),
            *_lacking("stays with", expected.stays, found.switches, "not needed"),
            *([f"no {expected.compiler!r}"] * (expected.compiler not in found.compiler)),
        ]

    @property
    def outcome(self) -> str:
        if self.missing:
            return self.missing
        return "; ".join(self.wrong) or "right"


def _unlike(verb: str, begins: Sequence[str], answers: Sequence[Answer], role: str) -> list[str]:
    """The expected answers that are not given, and those given that are not expected."""
    given = [answer.words for answer in answers if answer.role == role]
    more = [words for words in given if not words.startswith(tuple(begins))]
    return [*_lacking(verb, begins, answers, role), *(f"also said: {verb} {w}" for w in more)]


def _lacking(verb: str, begins: Sequence[str], answers: Sequence[Answer], role: str) -> list[str]:
    given = [answer.words for answer in answers if answer.role == role]
    absent = [begin for begin in begins if not any(words.startswith(begin) for words in given)]
    return [f"not said: {verb} {begin}" for begin in absent]


def rows(only: Sequence[str]) -> list[Expected]:
    """The rows of the file, or those named. Raises ValueError for a name that is none."""
    data = (HERE / "explained.toml").read_bytes()
    every = msgspec.toml.decode(data, type=dict[str, list[Expected]])["row"]
    if unknown := {*only} - {row.name for row in every}:
        raise ValueError(f"no row of explained.toml: {', '.join(sorted(unknown))}")
    return [row for row in every if not only or row.name in only]


def explained(expected: Expected, out: Path) -> Row:
    """Search for it, and explain the finding that is about it."""
    if expected.cpu and expected.cpu not in Path("/proc/cpuinfo").read_text():
        return Row(expected, missing=f"not tried: this CPU has no {expected.cpu}")
    folder = out / _folder(expected)
    plant = ["--plant", expected.name] if expected.planted else []
    release = ["--te-version", expected.te_version] if expected.te_version else []
    ours = [sys.executable, "-m", "narrowfuzz"]
    if not (folder / "summary.json").is_file():
        given = [*expected.search, "--quiet", "--out", str(folder)]
        ledger = [] if expected.planted else ["--no-ledger"]
        subprocess.run([*ours, "run", *given, *ledger, *plant, *release], check=False)
    finding = next(found(expected, folder), None)
    if finding is None:
        return Row(expected, missing="not found")
    seconds = finding / "seconds"
    if not (finding / FILE).is_file():
        start = time.monotonic()
        done = subprocess.run([*ours, "explain", str(finding), *plant, *release], check=False)
        if done.returncode:
            return Row(expected, missing=f"explain exits with {done.returncode}")
        seconds.write_text(f"{time.monotonic() - start:.0f}")
    return Row(expected, float(seconds.read_text()), load(finding))


def _folder(expected: Expected) -> str:
    """The name of a search's folder: known issues that one search finds share it."""
    own = expected.name if expected.planted else expected.te_version
    return re.sub(r"[^\w.+]+", "-", " ".join([own, *expected.search])).strip("-")


def found(expected: Expected, folder: Path) -> Iterator[Path]:
    """The folders of the findings of a search that are about the row, worst first."""
    for one in json.loads((folder / "summary.json").read_text())["findings"]:
        finding = folder / "findings" / one["id"]
        record = json.loads((finding / "explain.json").read_text())
        about = expected.planted or record["known_issue"] == expected.name
        if about and expected.sentence in record["sentence"]:
            yield finding


HEAD = (
    "| what | | it needs | it goes away with | it starts in | seconds | right? |",
    "| --- | --- | --- | --- | --- | ---: | --- |",
)


def line(row: Row) -> str:
    """A row of the table in Markdown."""
    said = row.explained
    cells = [
        f"`{row.expected.name}`",
        "planted" if row.expected.planted else "known issue",
        _words(said.needs) if said else "",
        _words(said.switches) if said else "",
        plain(said.compiler) if said else "",
        f"{row.seconds:.0f}" if said else "",
        plain(row.outcome),
    ]
    return f"| {' | '.join(cells)} |"


def _words(answers: Sequence[Answer]) -> str:
    gone = ("needed", "nothing judged")
    return "; ".join(plain(answer.words) for answer in answers if answer.role in gone) or "-"


def merged(page: str, new: Sequence[Row], order: Sequence[str]) -> str:
    """The page with these rows in place of its rows of the same names."""
    before, rest = page.split(BEGIN)
    there, after = rest.split(END, 1)
    lines = {one.split("`")[1]: one for one in there.splitlines() if one.startswith("| `")}
    lines |= {row.expected.name: line(row) for row in new}
    kept = [lines[name] for name in order if name in lines]
    return "\n".join([f"{before}{BEGIN}", "", *HEAD, *kept, "", f"{END}{after}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("reports/runs/explained"))
    parser.add_argument("--write", action="store_true", help="renew docs/explained.md")
    args = parser.parse_args()
    every = []
    for expected in rows(args.names):
        every.append(explained(expected, args.out))
        print(f"{expected.name}: {every[-1].outcome}", flush=True)
    print("\n".join((*HEAD, *map(line, every))))
    if args.write:
        order = [row.name for row in rows(())]
        PAGE.write_text(merged(PAGE.read_text(), every, order))
    return int(any(row.outcome != "right" and "not tried" not in row.outcome for row in every))


if __name__ == "__main__":
    sys.exit(main())
