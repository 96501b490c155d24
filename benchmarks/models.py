"""``make models``: ``narrowfuzz check`` on models that others wrote, as their user would run it.

The models are files of plain torch, and small models of transformers, timm and torchtitan, below
tests/own_models. Each is checked in its own precision, on float8 and on MXFP8, recomputed, compiled
and on ranks. Every report of ``check`` needs an owner in benchmarks/models.toml, with a reason: the
library whose bug it is, or narrowfuzz, if it is a false alarm. The tables are docs/models.md and,
for ranks, docs/models_on_ranks.md.

Results are stored in reports/runs/models; a check that has a result there is run again only with
``--again``, so a run that was stopped can be continued. Exit code 1: something reported has no
owner, is a false alarm of ours, or a check broke.

    make models ARGS="--only 'hf_transformers.py:*'"
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "tests" / "own_models"
STORED = ROOT / "reports" / "runs" / "models"
#: The models to check, and the owners of reports.
SETTINGS = Path(__file__).with_suffix(".toml")
NARROW = ("torchao.float8.rowwise", "torchao.mxfp8.rceil")
#: Ways to train, and the options of ``check`` that select them.
WAYS = {
    "recomputed": ("--checkpoint", "full"),
    "compiled": ("--compile", "aot_eager", "--checkpoint", "selective"),
    "inductor": ("--compile", "inductor"),
    "ranks": ("--arm", "sharded*"),
}
_USUAL = ROOT / "docs" / "models.md"
#: Way -> the table of its results.
TABLES = dict.fromkeys(WAYS, _USUAL) | {"ranks": ROOT / "docs" / "models_on_ranks.md"}
#: Owners that are not a library: narrowfuzz, and the model's own file.
OURS, PAGE = "narrowfuzz", "the page"
#: Seconds that a check may run beyond its --minutes, to triage its last findings.
_PATIENCE = 240.0
#: Checks that have not run are listed by name if there are at most this many.
_NAMED = 8


class Reported(msgspec.Struct, frozen=True):
    """One report of ``check`` about a model."""

    kind: str  # "finding", "suspected", "refused" or "broke"
    fingerprint: str
    sentence: str
    severity: str = ""


class Row(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"never_checked": "never", "reports": "said"},  # the names in stored files
):
    """The result of checking one model in one way."""

    model: str
    way: str
    code: int
    seconds: float
    cases: int = 0
    #: "recipe, arm" -> (linears that were checked individually, all linears).
    linears: dict[str, tuple[int, int]] = {}
    #: ``never_judged`` of the summary.
    never_checked: list[str] = []
    #: Id of a ledger entry -> number of divergences that it explained.
    known: dict[str, int] = {}
    reports: list[Reported] = []


@dataclass(frozen=True)
class Owner:
    """Who is responsible for the reports that match the globs of models, way and fingerprint, and
    why."""

    models: tuple[str, ...]
    owner: str
    why: str
    fingerprint: str = "*"
    way: str = "*"
    #: Text that the sentence must contain: for refusals, which have no fingerprint.
    says: str = ""

    def of(self, row: Row, report: Reported) -> bool:
        names = ((row.way, self.way), (report.fingerprint, self.fingerprint))
        named = any(fnmatchcase(row.model, model) for model in self.models)
        return named and all(fnmatchcase(*each) for each in names) and self.says in report.sentence


@dataclass(frozen=True)
class Model:
    """A model to check: its file and function, and the settings of the check."""

    name: str
    dtype: str
    ways: tuple[str, ...]
    #: Requirements of other releases to check it with, as for ``--with``.
    over: tuple[str, ...] = ()


def models(settings: dict[str, Any]) -> Iterator[Model]:
    for page in settings["page"]:
        for build in page["builds"]:
            ways = ["recomputed", "compiled", *["inductor"] * (build in page.get("inductor", ()))]
            ways += ["ranks"] * (build not in page.get("alone", ()))
            name, over = f"{page['file']}:{build}", tuple(page.get("with", ()))
            yield Model(name, page["dtype"], tuple(ways), over)


def owners_of(settings: dict[str, Any]) -> list[Owner]:
    return [Owner(**{**each, "models": tuple(each["models"])}) for each in settings["owner"]]


def checked(model: Model, way: str, args: argparse.Namespace) -> Row:
    """Run ``narrowfuzz check`` and read its JSON document."""
    folder = STORED / f"{model.name.replace(':', '.')}-{way}-{time.time_ns()}"
    recipes = [f"--recipe={name}" for name in (f"torch.{model.dtype}", *NARROW)]
    command = [
        sys.executable, "-m", "narrowfuzz", "check", f"{PAGES / model.name}", *recipes, *WAYS[way],
        *(f"--with={release}" for release in model.over), f"--cases={args.cases}",
        f"--minutes={args.minutes:g}", f"--workers={args.workers}", "--seed=1", "--json",
        f"--out={folder}",
    ]  # fmt: skip
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=60 * args.minutes + _PATIENCE)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it still prints the results that it has
        out, err = process.communicate()
    seconds = round(time.monotonic() - start, 1)
    return row_of(model.name, way, process.returncode, seconds, out, err)


def row_of(model: str, way: str, code: int, seconds: float, out: str, err: str) -> Row:
    """The result of a check that ended with this exit code and output."""
    last = err.strip().splitlines()[-1:] or [""]
    try:
        document = json.loads(out)
    except ValueError:
        document = {}
    if code == 2 or "cases" not in document:
        kind = "refused" if code == 2 else "broke"
        reports = [Reported(kind, "", last[0].removeprefix("narrowfuzz: "))]
        return Row(model=model, way=way, code=code, seconds=seconds, reports=reports)
    reports = [
        Reported(kind, one["fingerprint"], one["sentence"], one["severity"])
        for kind, name in (("finding", "findings"), ("suspected", "suspected"))
        for one in document[name]
    ]
    if code not in (0, 1, 4):
        reports.append(Reported("broke", "", f"exit code {code}: {' '.join(document['notes'])}"))
    return Row(
        model=model, way=way, code=code, seconds=seconds, cases=document["cases"],
        linears={
            f"{one['recipe']}, {one['arm']}": (len(one["linears"]), one["of"])
            for one in document["linears_judged"]
        },
        never_checked=document["never_judged"], known=document["known"], reports=reports,
    )  # fmt: skip


def file_of(model: str, way: str) -> Path:
    return STORED / f"{model.replace(':', '.')}-{way}.json"


def stored_rows(wanted: Sequence[tuple[Model, str]]) -> list[Row]:
    """The stored results of these checks, as far as they have run."""
    files = [file_of(model.name, way) for model, way in wanted]
    return [msgspec.json.decode(f.read_bytes(), type=Row) for f in files if f.is_file()]


def owner_of(row: Row, report: Reported, owners: Sequence[Owner]) -> Owner | None:
    return next((owner for owner in owners if owner.of(row, report)), None)


def wrong(rows: Sequence[Row], owners: Sequence[Owner]) -> Iterator[str]:
    """A line for each report that has no owner or is owned by narrowfuzz, and for each check that
    broke."""
    for row in rows:
        for report in row.reports:
            owner = owner_of(row, report, owners)
            if report.kind == "broke":
                yield f"{row.model} {row.way}: it broke: {report.sentence}"
            elif owner is None:
                yield f"{row.model} {row.way}: {report.kind} without an owner: {report.fingerprint}: {report.sentence}"  # noqa: E501
            elif owner.owner == OURS:
                why = f"{report.sentence} ({owner.why})"
                yield f"{row.model} {row.way}: a false alarm of ours: {why}"


def table(rows: Sequence[Row], owners: Sequence[Owner], missing: Sequence[str]) -> str:
    """The text of docs/models.md."""
    found = sum(len(row.reports) for row in rows)
    ranks = any(row.way == "ranks" for row in rows)
    false = sum(1 for _ in wrong(rows, owners))
    lines = [
        f"# Models that others wrote{', on ranks' * ranks}",
        "",
        "`make models` runs `narrowfuzz check` on each, as its user would, in the model's own",
        f"precision and with {' and '.join(f'`{name}`' for name in NARROW)}. This page is",
        "written by `benchmarks/models.py`. For everything that was reported,",
        "`benchmarks/models.toml` names who is responsible (its *owner*: a library, the model's",
        "own file, or narrowfuzz, if it is a false alarm), and why.",
        "",
        f"{len({row.model for row in rows})} models in {len(rows)} checks, {sum(r.cases for r in rows)} cases: "  # noqa: E501
        f"{found} reports, of which {false} are false alarms, or have no owner yet.",
        f"Versions: {', '.join(versions())}.",
        "",
        *(f"- *{way}*: `{' '.join(WAYS[way])}`" for way in dict.fromkeys(row.way for row in rows)),
        "- *pair*: a recipe and an arm. *never*: pairs of which nothing was checked, for lack of",
        "  cases or minutes, or because the library refuses the model. *s*: seconds.",
        "",
        f"| model | way | cases | {'checked' if ranks else 'linears checked individually'} "
        "| known issues seen | reported | s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_line(row, owners) for row in rows),
    ]
    if missing:
        names = f": {', '.join(missing)}" if len(missing) <= _NAMED else ""
        lines += ["", f"{len(missing)} more checks have not run here yet{names}."]
    by_owner: dict[Owner | None, list[str]] = {}
    for row in rows:
        for report in row.reports:
            words = report.sentence.replace("|", "\\|")
            line = f"- `{row.model}`, {row.way}, {report.kind}: {words}"
            by_owner.setdefault(owner_of(row, report, owners), []).append(line)
    if by_owner:
        lines += ["", "## What was reported, and who is responsible"]
    for owner, spoken in by_owner.items():
        whose = f"**{owner.owner}**: {owner.why}" if owner else "**no owner yet**"
        lines += ["", f"{whose}:", "", *dict.fromkeys(spoken)]
    return "\n".join(lines) + "\n"


def _line(row: Row, owners: Sequence[Owner]) -> str:
    counts = [f"{n} of {of} ({where})" for where, (n, of) in row.linears.items() if n]
    best = max(row.linears.values(), default=(0, 0))
    judged = (
        f"{best[0]} of {best[1]}, in {len(counts)} of {len(row.linears)} pairs"
        if counts
        else "none"
    )
    if row.way == "ranks":
        judged = "compared with one process"
    if row.never_checked:
        judged += f"; never: {len(row.never_checked)}"
    kinds = [f"{one.kind} ({who.owner if (who := owner_of(row, one, owners)) else 'no owner'})"
            for one in row.reports]  # fmt: skip
    reported = ", ".join(dict.fromkeys(kinds)) or "nothing"
    known = ", ".join(f"`{id}`" for id in sorted(row.known)) or "-"
    cells = (row.model, row.way, str(row.cases), judged, known, reported, f"{row.seconds:.0f}")
    return f"| {' | '.join(cells)} |"


def versions() -> Iterator[str]:
    for name in ("torch", "torchao", "transformers", "timm"):
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="GLOB", help="these FILE.py:BUILD only")
    parser.add_argument("--way", action="append", choices=WAYS, help="these ways only")
    parser.add_argument(
        "--cases", type=int, default=60, help="of each check: fewer leave a recipe out"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="of each check at most")
    parser.add_argument("--workers", type=int, default=0, help="of each check; 0: one per core")
    parser.add_argument("--again", action="store_true", help="run what has run before, too")
    args = parser.parse_args()
    settings = tomllib.loads(SETTINGS.read_text())
    owners = owners_of(settings)
    every = [(model, way) for model in models(settings) for way in model.ways]
    wanted = [
        (model, way) for model, way in every
        if any(fnmatchcase(model.name, glob) for glob in args.only or ("*",))
        and way in (args.way or WAYS)
    ]  # fmt: skip
    if not wanted:
        parser.error(f"--only {' '.join(args.only)}: no model of {SETTINGS.name} is called so")
    STORED.mkdir(parents=True, exist_ok=True)
    for model, way in wanted:
        file = file_of(model.name, way)
        if file.is_file() and not args.again:
            continue
        row = checked(model, way, args)
        file.write_bytes(msgspec.json.encode(row))
        print(f"{row.seconds:6.0f} s  {model.name} {way}: {row.cases} cases, exit code {row.code}")
        print(*(f"          {line}" for line in wrong([row], owners)), sep="\n", flush=True)
    tables = dict.fromkeys(TABLES[way] for _, way in wanted)
    for path in tables:
        here = [(model, way) for model, way in every if TABLES[way] == path]
        rows = stored_rows(here)
        there = {(row.model, row.way) for row in rows}
        missing = [f"`{m.name}` {way}" for m, way in here if (m.name, way) not in there]
        path.write_text(table(rows, owners, missing))
    faults = list(wrong(stored_rows(wanted), owners))
    written = " and ".join(str(path.relative_to(ROOT)) for path in tables)
    print(f"{len(faults)} faults in {len(stored_rows(wanted))} checks; {written}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
