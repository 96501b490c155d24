"""``make history``: what campaigns find in old releases of a package, and which later release no
longer shows it.

Each release is searched without the ledger, and nothing is looked up before the campaign has
ended. Then the script of each finding is run on later releases. If a folder already holds the
campaign of a release, that is read instead of a new run. ``--write`` puts the table into
docs/history.md, where rows of releases that are not named stay. A release of torch runs from a
folder with all that it needs, which is gigabytes.

    python benchmarks/history.py torchao 0.9.0 0.11.0 --minutes 6 --out reports/runs/history --write
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from narrowfuzz.bisect import releases
from narrowfuzz.bisect.script import FLAKY_RUNS, Script, script_of
from narrowfuzz.bisect.search import Line, VersionAnswer, change
from narrowfuzz.report.markdown import plain
from packaging.version import Version

PAGE = Path(__file__).resolve().parents[1] / "docs" / "history.md"
END = "<!-- end of table -->"


@dataclass(frozen=True)
class Package:
    """A package whose releases are searched."""

    name: str
    recipes: tuple[str, ...]
    #: Option of ``narrowfuzz run`` that chooses a release, and its value; none where a release is
    #: chosen by the environment of the command.
    chosen: tuple[str, str] | tuple[()] = ()
    #: Release -> releases of other packages that it was made for, as PACKAGE==VERSION.
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Releases on which no script runs.
    left_out: tuple[str, ...] = ()

    def options(self, version: str) -> list[str]:
        """The options of ``narrowfuzz run`` for one release."""
        globs = [part for glob in self.recipes for part in ("--recipe", glob)]
        others = [part for other in self.others(version) for part in ("--with", other)]
        return [*globs, *(part.format(version) for part in self.chosen), *others]

    def others(self, version: str) -> tuple[str, ...]:
        return self.beside.get(version, ())

    def variables(self, version: str) -> dict[str, str]:
        """The environment variables of a campaign that choose a release, where no option does."""
        return {} if self.chosen else self.environment(version).changed_variables

    def environment(self, version: str) -> releases.ReleaseEnvironment:
        """How a script imports this release. Raises ValueError if it cannot be installed."""
        return releases.release_environment(self.name, version, self.others(version))

    @property
    def begin(self) -> str:
        return f"<!-- table: make history, {self.name} -->"


#: The torchao that each torchtitan was made for: docs/torchtitan.md.
_TORCHAO = {"0.1.0": "0.11.0", "0.2.0": "0.15.0", "0.2.1": "0.15.0", "0.2.2": "0.15.0"}
PACKAGES = {
    package.name: package
    for package in (
        # each release is gigabytes: of each minor one the last
        Package("torch", ("torch.*", "torchao.float8.*"), left_out=("2.12.0", "2.14.0")),
        Package("torchao", ("torchao.float8.*", "torchao.mxfp8.*"), ("--with", "torchao=={}")),
        Package(
            "torchtitan",
            ("torchtitan.*",),
            ("--with", "torchtitan=={}"),
            {release: (f"torchao=={ao}",) for release, ao in _TORCHAO.items()},
        ),
        Package("transformer_engine", ("te.*",), ("--te-version", "{}")),
    )
}


@dataclass(frozen=True)
class Row:
    """One symptom: the finding of the oldest release that had it, and which release fixed it."""

    fingerprint: str
    sentence: str
    severity: str
    #: The ledger entry that explains it, looked up after the campaign; "" if there is none.
    known_issue: str
    folder: Path
    releases: tuple[str, ...]
    #: How often its script runs without showing it before it is gone.
    runs: int = 1
    fate: str = ""


def campaign(package: Package, version: str, minutes: float, out: Path) -> Path:
    """Run the campaign of one release, unless its folder already holds one. Returns the folder."""
    folder = out / version
    if not (folder / "summary.json").is_file():
        ours = [sys.executable, "-m", "narrowfuzz", "run", "--no-ledger", "--seed", "1"]
        given = ["--minutes", str(minutes), "--out", str(folder)]
        env = {**os.environ, **package.variables(version)}
        subprocess.run([*ours, *package.options(version), *given], env=env, check=False)
    return folder


def rows(out: Path, versions: Sequence[str]) -> list[Row]:
    """The findings of these releases, oldest release first, merged by fingerprint and known issue.
    Suspected ones are left out, as they have no script."""
    found: dict[tuple[str, str], Row] = {}
    for version in versions:
        summary = json.loads((out / version / "summary.json").read_text())
        for one in summary["findings"]:
            file = out / version / "findings" / one["id"] / "explain.json"
            explained = json.loads(file.read_text())
            name = explained["fingerprint"], explained["known_issue"] or ""
            if name in found:
                found[name] = replace(found[name], releases=(*found[name].releases, version))
            else:
                sentence, severity = explained["sentence"], explained["severity"]
                runs = 1 if explained["flake"] == "always" else FLAKY_RUNS
                folder = file.parent
                found[name] = Row(name[0], sentence, severity, name[1], folder, (version,), runs)
    return list(found.values())


def fate(package: Package, row: Row, every: Sequence[str]) -> str:
    """Text that states which later release no longer shows the symptom, found by running its
    script."""
    if row.fingerprint.endswith("--torch") and package.name != "torch":
        return "torch's own"
    # not the finding itself: its case may be of a model that only the release brings
    script = script_of(str(row.folder / "repro.py"), row.runs)
    later = [v for v in every if Version(v) >= Version(row.releases[0])]
    line = Line(later, lambda version: ask(package, script, version))
    if line.at(0).answer != "shows":
        return f"not shown again: {line.at(0).why or 'its script passes'}"
    newest = next(p for p in reversed(range(len(later))) if line.at(p).answer != "cannot tell")
    undecided = f"; {later[newest + 1]} and later cannot tell" if newest + 1 < len(later) else ""
    if line.at(newest).answer == "shows":
        return f"stands in {later[newest]}{undecided}"
    return f"fixed in {change(line, 0, newest).after.version}{undecided}"


def every_fate(
    package: Package, found: Sequence[Row], every: Sequence[str], file: Path
) -> Iterator[Row]:
    """The rows with their fates, which are cached in ``file``."""
    known = json.loads(file.read_text()) if file.is_file() else {}
    for row in found:
        key = f"{row.releases[0]} {row.fingerprint} {row.known_issue}".rstrip()
        known[key] = known.get(key) or fate(package, row, every)
        file.write_text(json.dumps(known, indent=1))
        print(f"{known[key]:40} {row.fingerprint}", flush=True)
        yield replace(row, fate=known[key])


def ask(package: Package, script: Script, version: str) -> VersionAnswer:
    try:
        environment = package.environment(version)
    except ValueError as error:
        return VersionAnswer(version, "cannot tell", str(error))
    return script.ask(version, environment.changed_variables)


def table(found: Sequence[Row], out: Path, versions: Sequence[str]) -> Iterator[str]:
    """The tables of releases and of findings, in Markdown."""
    yield "| release | minutes | cases | findings | suspected |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for version in versions:
        summary = json.loads((out / version / "summary.json").read_text())
        counts = summary["cases"], len(summary["findings"]), len(summary["suspected"])
        cells = version, f"{summary['seconds'] / 60:.0f}", *map(str, counts)
        yield f"| {' | '.join(cells)} |"
    yield "\n| found | severity | in | what became of it | known issue |"
    yield "| --- | --- | --- | --- | --- |"
    for row in sorted(found, key=lambda row: (_order(row.fate), row.fingerprint)):
        named = row.severity, ", ".join(row.releases), row.fate, row.known_issue
        yield f"| {plain(shortened(row.sentence))} | {' | '.join(named)} |"


def shortened(sentence: str) -> str:
    """The sentence, cut to at most 160 characters."""
    return sentence if len(sentence) <= 160 else f"{sentence[:157].rstrip()}..."


def _order(fate: str) -> int:
    return next(i for i, word in enumerate(("fixed", "stands", "torch", "")) if word in fate)


def write(package: Package, lines: Sequence[str]) -> None:
    before, rest = PAGE.read_text().split(package.begin)
    there, after = rest.split(END, 1)
    text = "\n".join(merged(there.splitlines(), lines))
    PAGE.write_text(f"{before}{package.begin}\n\n{text}\n\n{END}{after}")


def merged(there: Sequence[str], new: Sequence[str]) -> list[str]:
    """The lines of new tables, with the rows of those ``there`` whose releases the new ones do not
    have. A finding of both is one row, of the releases of both."""
    new = "\n".join(new).splitlines()
    old_runs, old_found = _cells(there)
    runs, found = _cells(new)
    again = {row[0] for row in runs}
    runs += [row for row in old_runs if row[0] not in again]
    for sentence, severity, had, what, known in old_found:
        stays = [version for version in had.split(", ") if version not in again]
        same = next((row for row in found if (row[0], row[4]) == (sentence, known)), None)
        if same is None and stays:
            found.append([sentence, severity, ", ".join(stays), what, known])
        elif same is not None:
            both = {*stays, *same[2].split(", ")}
            same[2] = ", ".join(sorted(both, key=Version))
    runs.sort(key=lambda row: Version(row[0]))
    found.sort(key=lambda row: _order(row[3]))
    heads = [line for line in new if not _is_row(line)]
    middle = next((i for i, line in enumerate(heads) if not line), len(heads))
    first, second = (map(_line, rows) for rows in (runs, found))
    return [*heads[:middle], *first, *heads[middle:], *second]


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _is_row(line: str) -> bool:
    cells = _split(line)
    return len(cells) == 5 and cells[0] not in ("release", "found", "---")


def _cells(lines: Sequence[str]) -> tuple[list[list[str]], list[list[str]]]:
    """The cells of the rows of the table of releases, and of that of findings."""
    rows = [_split(line) for line in lines if _is_row(line)]
    return [r for r in rows if r[1].isdigit()], [r for r in rows if not r[1].isdigit()]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", choices=sorted(PACKAGES))
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("reports/runs/history"))
    parser.add_argument("--write", action="store_true", help="put the table into docs/history.md")
    args = parser.parse_args()
    package, out = PACKAGES[args.package], args.out / args.package
    versions = sorted(args.versions, key=Version)
    for version in versions:
        campaign(package, version, args.minutes, out)
    every = [v for v in releases.releases(package.name) if v not in package.left_out]
    found = list(every_fate(package, rows(out, versions), every, out / "fates.json"))
    lines = list(table(found, out, versions))
    print("\n".join(lines))
    if args.write:
        write(package, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
