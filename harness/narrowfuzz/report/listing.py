"""``narrowfuzz list`` and ``narrowfuzz known``: recipes, models, rules and the rest as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from narrowfuzz.arms.available import natives, on_ranks, rungs_of, select_arms, unavailable
from narrowfuzz.case.ladder import BY_NAME, LADDER
from narrowfuzz.ledger.advice import applying
from narrowfuzz.ledger.by_patch import by_cause, counted, same_cause
from narrowfuzz.ledger.ledger import KINDS, load_entries
from narrowfuzz.machine.environment import prepare
from narrowfuzz.machine.machine import machine
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.operators import OPERATORS
from narrowfuzz.operators import BY_NAME as BY_OPERATOR
from narrowfuzz.plants.registry import builtin_plants
from narrowfuzz.recipe import deprecated
from narrowfuzz.recipe.recipe import (
    load_every,
    load_recipes,
    obstacles,
    runnable,
    select,
    unknown,
)
from narrowfuzz.report.terminal import console, print_table
from narrowfuzz.rules import BY_NAME as BY_RULE
from narrowfuzz.rules.texts import needs_of, title_of

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Listing:
    """All things of one kind, and the table that shows them."""

    records: Sequence[Record]
    #: Title of a table's column -> the field that it shows.
    columns: Mapping[str, str]
    #: A sentence below the table.
    sentence: str = ""


@dataclass(frozen=True)
class ListingOptions:
    """Options of ``narrowfuzz list``."""

    files: tuple[Path, ...] = ()
    #: Globs that select known issues which these recipes may show on these arms, or findings of
    #: these recipes and arms.
    recipes: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    #: The database of findings, a file or URL; "": the default one.
    database: str = ""


def listed(what: str, options: ListingOptions = ListingOptions()) -> Listing:
    """The listing of one kind. Raises ValueError for a kind, recipe or arm that does not exist."""
    if what in deprecated.LISTINGS:
        deprecated.warn(f"list {what}", f"list {deprecated.LISTINGS[what]}")
        what = deprecated.LISTINGS[what]
    if what not in _KINDS:
        raise ValueError(unknown("list", what, _KINDS))
    if (options.recipes or options.arms) and what not in ("known", "findings"):
        raise ValueError(f"--recipe and --arm choose known issues or findings, not {what}")
    prepare()
    return _KINDS[what](options)


def print_listing(listing: Listing) -> None:
    """Print a table, then its sentence; without records only the sentence."""
    if not listing.records:
        print(listing.sentence)
        return
    table = Table(box=None, pad_edge=False)
    for i, title in enumerate(listing.columns):
        table.add_column(title, overflow="fold", no_wrap=i == 0)
    for record in listing.records:
        table.add_row(*(_cell(name, record[name]) for name in listing.columns.values()))
    print_table(table, listing.sentence)


def _cell(name: str, value: Any) -> str:
    if name in ("first_seen", "last_seen"):
        return str(value).partition("T")[0]
    if isinstance(value, Mapping):  # package -> versions
        return "\n".join(f"{package} {', '.join(all_)}" for package, all_ in value.items())
    return ", ".join(value) or "-" if isinstance(value, list | tuple) else str(value) or "-"


def _recipes(options: ListingOptions) -> Listing:
    records = []
    for r in load_every(options.files).values():
        lacking = obstacles(r, "cpu")
        reasons = [f"not {backend}: {why}" if backend else why for backend, why in lacking.items()]
        records.append(
            {
                "id": r.name,
                "backends": [*filter(None, r.backends)],
                "title": r.title,
                "here": "\n".join(reasons) or "available",
                "lacking": lacking,
            }
        )
    columns = {"recipe": "id", "backends": "backends", "what": "title", "here": "here"}
    return Listing(records, columns)


def _models(options: ListingOptions) -> Listing:
    records = [{"id": m.name, "title": m.title} for m in MODELS.values()]
    return Listing(records, {"model": "id", "what": "title"})


def _operators(options: ListingOptions) -> Listing:
    records = [
        {
            "id": operator.name,
            "title": operator.words,
            "kernels": list(operator.kernels),
            "functions": list(operator.functions),
            "alone": [m.name for m in OPERATORS if operator.name in (m.operators or ())],
        }
        for operator in BY_OPERATOR.values()
    ]
    columns = {"operator": "id", "what": "title", "models of it alone": "alone"}
    return Listing(records, columns)


def _arms(options: ListingOptions) -> Listing:
    records = [
        {"id": a.name, "title": a.title, "here": unavailable(a) or "available"} for a in LADDER
    ]
    return Listing(records, {"arm": "id", "what": "title", "here": "here"})


def _rules(options: ListingOptions) -> Listing:
    records = [
        {
            "id": o.name,
            "title": title_of(o.name),
            "strength": o.strength,
            "level": o.level,
            "precondition": needs_of(o.name),
        }
        for o in BY_RULE.values()
    ]
    columns = {"rule": "id", "what": "title", "strength": "strength"}
    return Listing(records, {**columns, "applies where": "precondition"})


def _plants(options: ListingOptions, *, kind: str, legal: bool) -> Listing:
    records = [
        {"id": p.id, "family": p.family, "title": p.title, "recipes": p.recipes, "needs": p.needs}
        for p in builtin_plants().values()
        if p.legal == legal
    ]
    columns = {"family": "family", "what": "title", "recipes": "recipes", "needs": "needs"}
    return Listing(records, {kind: "id", **columns})


def _coverage(options: ListingOptions) -> Listing:
    from narrowfuzz.draw.coverage import table, universe
    from narrowfuzz.draw.factors import rows

    able = {n: r for n, x in load_recipes(options.files).items() if (r := runnable(x, "cpu"))}
    names = ("recipe", "factor", "drawn", "not_applicable", "not_yet")
    records = [dict(zip(names, row, strict=True)) for row in rows(able)]
    arms = select_arms(())
    whole = universe(
        able, rungs_of(arms, "cpu"), native=natives(arms, "cpu"), sharded=on_ranks(arms, "cpu")
    )
    there = ", ".join(f"{what} {count}" for what, _, count in table((), whole))
    note = f"pairs of features that one case can have: {there}; narrowfuzz run -v says how many did"
    return Listing(records, {name.replace("_", " "): name for name in names}, note)


def _known(options: ListingOptions) -> Listing:
    entries = load_entries()
    if options.recipes or options.arms:
        chosen = select(load_every(options.files, options.recipes), options.recipes).values()
        arms = [BY_NAME[name] for name in select_arms(options.arms)]
        entries = applying(entries, chosen, arms, machine())
    records = [
        {
            "id": e.id,
            "severity": e.severity,
            "recipes": e.recipes,
            "title": e.title,
            "workaround": e.workaround,
            "links": e.links,
            "kind": e.kind,
            "cause": e.one_cause,
            "same_cause": same_cause(e, entries),
        }
        for together in by_cause(entries).values()
        for e in together
    ]
    columns = {
        "known issue": "id",
        "severity": "severity",
        "kind": "kind",
        "what": "title",
        "what helps": "workaround",
    }
    return Listing(records, columns, counted(entries))


def _findings(options: ListingOptions) -> Listing:
    from narrowfuzz.report.lifetime import STATES, Database

    names = select_arms(options.arms)
    database = Database.existing(options.database)
    lives = tuple(database.lifetimes()) if database else ()
    records = [
        record
        for life in lives
        if (record := life.record())["arm"] in names
        and any(fnmatchcase(record["recipe"], glob) for glob in options.recipes or ("*",))
    ]
    columns = {
        "finding": "id",
        "state": "state",
        "severity": "severity",
        "first seen": "first_seen",
        "last seen": "last_seen",
        "times": "times_seen",
        "with": "versions",
        "known issue": "known_issue",
        "what": "sentence",
    }
    states = [record["state"] for record in records]
    counts = ", ".join(f"{n} {state}" for state in STATES if (n := states.count(state)))
    none = "no finding has such a recipe and arm" if lives else "no run has recorded a finding"
    return Listing(records, columns, counts or none)


_KINDS: Mapping[str, Callable[[ListingOptions], Listing]] = {
    "recipes": _recipes,
    "models": _models,
    "operators": _operators,
    "arms": _arms,
    "rules": _rules,
    "faults": partial(_plants, kind="fault", legal=False),
    "controls": partial(_plants, kind="control", legal=True),
    "known": _known,
    "findings": _findings,
    "coverage": _coverage,
}


def known_command(id: str, *, issue: bool = False) -> None:
    """Print a known issue, or the text of an issue to file. Raises ValueError with the nearest
    match if there is no such id, or stating what the entry lacks for an issue."""
    entries = {entry.id: entry for entry in load_entries()}
    merged = {old: entry for entry in entries.values() for old in entry.formerly}
    if id not in entries and id not in merged:
        raise ValueError(unknown("known issue", id, entries))
    entry = entries.get(id) or merged[id]
    if issue:
        from narrowfuzz.report.known_issue import issue_text  # imports torch

        print(issue_text(entry))
        return
    page = console(markup=False)
    if id in merged:
        page.print(f"{id} was merged into {entry.id}:\n")
    versions_ = ", ".join(f"{name} {wanted}" for name, wanted in entry.versions.items())
    parts = {
        "": f"{entry.title}\n\n{entry.explanation.strip()}",
        "severity": f"{entry.severity} ({entry.symptom}, the use is {entry.use})",
        "kind": KINDS[entry.kind],
        "same cause as": ", ".join(same_cause(entry, [*entries.values()])) or "no other entry",
        "expected": entry.expected,
        "what helps": entry.workaround,
        "fixed in": entry.cured or "no version that was tried",
        "recipes": ", ".join(entry.recipes),
        "versions": versions_,
        "seen on": ", ".join(entry.hardware),
        "documentation": entry.documentation,
        "links": " ".join(entry.links) or f"none: {entry.searched}",
        "script": str(entry.path),
        **({"to file": f"narrowfuzz known {id} --issue"} if entry.issue else {}),
    }
    for name, text in parts.items():
        page.print(f"{name}: {text}" if name else f"{text}\n")
