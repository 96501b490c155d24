"""``narrowfuzz known ID --issue``: a known issue as text that can be filed with its library."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from te_on_cpu.environment import chosen_version, ensure, real_extension
from te_on_cpu.install import SUPPORTED

from narrowfuzz.ledger.filed import Issue, Place
from narrowfuzz.ledger.ledger import KINDS, Entry
from narrowfuzz.machine.environment import versions

TE = "transformer_engine"
#: The required fields of an entry's table [issue]; the others are optional.
_WANTED = "title, summary, actual, expected, cause, places and fix"


class Source(NamedTuple):
    """The folder of an installation's packages, one of its packages, and that package's version."""

    root: Path
    package: str
    version: str


def issue_text(entry: Entry) -> str:
    """Markdown for the issue tracker. Raises ValueError stating what the entry lacks."""
    return f"{issue_body(entry)}\n{_section('Versions', _versions(entry))}"


def issue_body(entry: Entry) -> str:
    """The part of the text that depends on the installed release only, not on the machine.

    Raises ValueError if the entry lacks what an issue needs, or if the installed source no longer
    has a line that the entry quotes.
    """
    issue = _told(entry)
    script = entry.reproduction.read_text().strip()
    shown = "\n\n".join(
        part for part in (issue.before, f"```python\n{script}\n```", _emulated(entry)) if part
    )
    explained = {thread.split()[0].rstrip(":") for thread in issue.related}
    links = [link for link in entry.links if link not in explained]
    sections = {
        "Reproduction": shown,
        "Actual": f"```\n{issue.actual.strip()}\n```",
        "Expected": issue.expected.strip(),
        "Cause": "\n\n".join([issue.cause.strip(), *(quoted(entry, p) for p in issue.places)]),
        "Suggested fix": issue.fix.strip(),
        "Related": "\n".join(f"- {thread}" for thread in (*links, *issue.related)),
    }
    body = "\n".join(_section(title, text) for title, text in sections.items() if text)
    return f"# {issue.title}\n\n{issue.summary.strip()}\n\n{body}"


def _section(title: str, text: str) -> str:
    return f"### {title}\n\n{text}\n"


def _told(entry: Entry) -> Issue:
    if entry.issue is None:
        kind = f" ({KINDS[entry.kind]})" if entry.kind else ""
        cured = f", which is cured in {entry.cured}," if entry.cured else ""
        raise ValueError(f"{entry.id}{kind}{cured} has no table [issue] with {_WANTED} in its file")
    if not entry.reproduction.is_file():
        raise ValueError(f"{entry.id} has no {entry.reproduction.name} beside it to reproduce it")
    return entry.issue


def _emulated(entry: Entry) -> str:
    if TE not in entry.versions or real_extension():
        return ""
    return (
        "This was run on a CPU: TransformerEngine's own Python on an emulation of its compiled "
        "extension. It has not been run on a GPU yet."
    )


def quoted(entry: Entry, place: Place) -> str:
    """Markdown with a place's line number in the installed release, and the line itself."""
    source = source_of(entry, place)
    number = line_number(source, place)
    function = f" in `{place.function}`" if place.function else ""
    where = f"`{place.file}`, line {number}{function} ({source.package} {source.version}):"
    return f"{where}\n\n```python\n{place.line}\n```"


def source_of(entry: Entry, place: Place) -> Source:
    """The installation in which a place is looked up. Raises ValueError if it is absent."""
    package = place.file.split("/")[0]
    if package == TE and not real_extension():
        version = release_of_te(entry)
        return Source(ensure(version), package, version)
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"{entry.id} quotes {place.file}: {package} is not installed here")
    try:
        version = Version(importlib.metadata.version(package)).public
    except importlib.metadata.PackageNotFoundError:
        version = "of no release"
    return Source(Path(found.origin).parents[1], package, version)


def release_of_te(entry: Entry) -> str:
    """The TransformerEngine under test if the entry holds for it, else the newest it holds for."""
    releases, chosen = _releases_of_te(entry), chosen_version()
    return chosen if chosen in SpecifierSet(entry.versions[TE]) else releases[-1]


def _releases_of_te(entry: Entry) -> list[str]:
    """The releases of TransformerEngine that an entry holds for and that can run here."""
    able = (known.replace("*", "0") for known in SUPPORTED)
    return sorted(SpecifierSet(entry.versions[TE]).filter(able), key=Version)


def line_number(source: Source, place: Place) -> int:
    """The line number of a place, counted from 1. Raises ValueError if the file or the line is no
    longer there."""
    file = source.root / place.file
    if not file.is_file():
        raise ValueError(f"{source.package} {source.version} has no {place.file}")
    text = file.read_text()
    first, last = _span(ast.parse(text), place.function.split(".") if place.function else [])
    for number, line in enumerate(text.splitlines(), 1):
        if first <= number <= last and line.strip() == place.line:
            return number
    raise ValueError(
        f"{place.file} of {source.package} {source.version} has no line {place.line!r} "
        f"in {place.function or 'it'}: look at it again, and correct the entry's places"
    )


def _span(node: ast.AST, names: list[str]) -> tuple[float, float]:
    """First and last line of the definition with this dotted name inside ``node``; an empty range
    if there is none."""
    if not names:
        return getattr(node, "lineno", 1), getattr(node, "end_lineno", float("inf"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for inner in ast.walk(node):
        if isinstance(inner, kinds) and inner.name == names[0]:
            return _span(inner, names[1:])
    return float("inf"), 0


def _versions(entry: Entry) -> str:
    """A short form of torch.utils.collect_env, and the releases the entry was confirmed on."""
    from torch.utils import collect_env

    run, found = collect_env.run, versions()
    packages = {name: found[name] for name in ("torch", "torchao") if found[name] != "absent"}
    if TE in entry.versions:
        packages[TE] = chosen_version() if real_extension() else release_of_te(entry)
    about = {
        **packages,
        "Python": found["python"],
        "OS": collect_env.get_os(run),
        "GCC": collect_env.get_gcc_version(run),
        "Clang": collect_env.get_clang_version(run),
        "CPU": _cpu(collect_env.get_cpu_info(run)),
        "confirmed on": confirmed_on(entry),
    }
    return "\n".join(f"- {name}: {text}" for name, text in about.items() if text)


def confirmed_on(entry: Entry) -> str:
    """The releases that an entry holds for, in words. Those of TransformerEngine one by one: a
    range of them has others that were never run."""
    wanted = dict(entry.versions)
    if TE in wanted:
        wanted[TE] = ", ".join(_releases_of_te(entry))
    return ", ".join(f"{name} {releases}" for name, releases in wanted.items())


def _cpu(lscpu: str | None) -> str:
    named = [line for line in (lscpu or "").splitlines() if line.startswith("Model name:")]
    return named[0].split(":", 1)[1].strip() if named else ""
