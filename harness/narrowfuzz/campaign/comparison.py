"""The results of two runs of the same cases, compared: plain data, for terminal, page and JSON."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowfuzz.campaign.comparison_side import (
    NOTE,
    CaseSeen,
    case_file,
    known_there,
    numbered,
    read_seen,
    shown_alone,
)
from narrowfuzz.ledger.severity import SEVERITIES
from narrowfuzz.report.accepted import IDLE
from narrowfuzz.report.judged import Combination
from narrowfuzz.trace.hashes import KINDS, Hashes, Kind

#: Names of the two sides in all output.
LETTERS = ("A", "B")


@dataclass(frozen=True)
class SideRun:
    """The results of one side's run."""

    #: As the user named it.
    title: str
    #: Its name is that of the side: A or B.
    folder: Path
    seen: Sequence[CaseSeen]
    #: Rows of ``findings.jsonl``, by fingerprint.
    rows: Mapping[str, dict[str, Any]]
    #: Fingerprint of a sighting -> id of the finding whose cause it shares.
    parts: Mapping[str, str]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def letter(self) -> str:
        return self.folder.name

    @cached_property
    def by_draw(self) -> dict[tuple[str, int], CaseSeen]:
        """The results by case id and number of the draw of this case: see ``numbered``."""
        return numbered(self.seen)

    @cached_property
    def causes(self) -> dict[str, list[CaseSeen]]:
        """Fingerprint -> the cases that show it, in order."""
        found: dict[str, list[CaseSeen]] = {}
        for one in self.seen:
            for name in one.causes:
                found.setdefault(name, []).append(one)
        return found

    def case(self, one: CaseSeen) -> str:
        """The file of a case that showed a divergence, relative to the comparison's folder."""
        return f"{self.letter}/{case_file(self.folder, one.case).relative_to(self.folder)}"

    @property
    def versions(self) -> str:
        """The tested versions and checkouts, in words."""
        versions, checkouts = self.environment["versions"], self.environment["checkouts"]
        named = [f"{name} {versions[name]}" for name in ("torch", "torchao") if name in versions]
        return "  ".join([*named, *(f"{name} from {path}" for name, path in checkouts.items())])


@dataclass(frozen=True)
class Difference:
    """A divergence that one side shows and the other does not."""

    fingerprint: str
    #: A or B.
    side: str
    #: new: a script shows it; suspected: no script does.
    status: str
    severity: str
    sentence: str
    recipe: str
    arm: str
    #: How many of its side's cases show it.
    cases: int
    #: Files of the run, relative to the comparison's folder; "" if there is none.
    case: str = ""
    script: str = ""
    #: Why no script shows it, and why it is accepted and does not count; "" otherwise.
    why_suspected: str = ""
    accepted: str = ""

    @property
    def counts(self) -> bool:
        return self.status == "new" and not self.accepted


@dataclass(frozen=True)
class Common:
    """A divergence that both sides show. It is not triaged."""

    fingerprint: str
    #: On A and on B, of the first case that shows it on both; they differ if it got worse or
    #: better.
    sentences: tuple[str, str]
    recipe: str
    arm: str
    #: How many cases show it, on A and on B.
    cases: tuple[int, int]
    case: str = ""


@dataclass(frozen=True)
class Known:
    """An entry of the ledger that explained something."""

    id: str
    #: On how many cases, on A and on B.
    cases: tuple[int, int]
    #: True if only one side's ledger explains it while both sides gave the same bits.
    by_ledger: bool = False

    @property
    def one_side(self) -> str:
        """The only side that shows it; "" if both do, or if only the ledgers differ."""
        return "" if all(self.cases) or self.by_ledger else LETTERS[self.cases[0] == 0]


@dataclass(frozen=True)
class Bits:
    """How many results were compared bit for bit, how many differ, and the first that differs."""

    compared: Mapping[Kind, int]
    differ: Mapping[Kind, int]
    #: How many cases have a result that differs.
    cases: int
    first: str = ""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    sides: tuple[SideRun, SideRun]
    #: How many cases were judged on both sides, on A only and on B only.
    cases: tuple[int, int, int]
    #: Rule -> the number of cases that it judged on both sides.
    rules: Mapping[str, int]
    #: Combinations of recipe, arm and model that were judged on both sides, and all others, in
    #: words.
    judged_on_both: Sequence[Combination]
    not_judged_on_both: Sequence[str]
    bits: Bits
    #: Those that count come first, then the most severe.
    differences: Sequence[Difference]
    common: Sequence[Common]
    known: Sequence[Known]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def counting(self) -> list[Difference]:
        return [one for one in self.differences if one.counts]

    @property
    def known_on_one_side(self) -> list[Known]:
        """The entries that only one side shows."""
        return [one for one in self.known if one.one_side]

    @property
    def differ(self) -> bool:
        return bool(self.counting or self.known_on_one_side)

    @property
    def empty(self) -> bool:
        """True if nothing was judged on both sides."""
        return not self.rules


def side_run(title: str, folder: Path) -> SideRun:
    """Read the files of one side's run."""
    lines = (folder / "findings.jsonl").read_text().splitlines()
    rows = {row["fingerprint"]: row for row in map(json.loads, lines)}
    with closing(sqlite3.connect(folder / "findings.db")) as db:
        parts = dict(
            db.execute(
                "select fingerprint, sighting_of from findings where status = 'sighting'"
            ).fetchall()
        )
    return SideRun(
        title,
        folder,
        read_seen(folder),
        rows,
        parts,
        json.loads((folder / "summary.json").read_text()),
        json.loads((folder / "env.json").read_text()),
    )


def compared(a: SideRun, b: SideRun) -> Comparison:
    """Compare one side's run with the other's, case by case."""
    pairs = [(one, b.by_draw[key]) for key, one in a.by_draw.items() if key in b.by_draw]
    both = sorted({c for one, other in pairs for c in _combinations(one) & _combinations(other)})
    wanted = {*a.summary["never_judged"], *b.summary["never_judged"]}
    wanted |= {" ".join(c) for side in (a, b) for one in side.seen for c in _combinations(one)}
    return Comparison(
        sides=(a, b),
        cases=(len(pairs), len(a.by_draw) - len(pairs), len(b.by_draw) - len(pairs)),
        rules=_rules(pairs),
        judged_on_both=both,
        not_judged_on_both=sorted(wanted - {" ".join(c) for c in both}),
        bits=_bits(pairs),
        differences=sorted((*_alone(a, b), *_alone(b, a)), key=_by_severity),
        common=[*_common(a, b), *_known_on_one(a, b), *_known_on_one(b, a)],
        known=_known(a, b, pairs),
        notes=[*_same_releases(a, b), *_notes(a, b)],
    )


def _same_releases(a: SideRun, b: SideRun) -> Iterator[str]:
    """That neither side replaced what the other tested: a folder may lie in the wrong place."""
    if all(a.environment[key] == b.environment[key] for key in ("versions", "checkouts")):
        yield (
            f"both sides tested {a.versions.replace('  ', ', ')}, from the same place or as "
            "installed; a folder with a changed package must contain the package's folder"
        )


def _notes(a: SideRun, b: SideRun) -> Iterator[str]:
    """What the runs of both sides note. An entry of the file of accepted findings that matched on
    one side is in use, though the other side did not see it."""
    on_both = {*a.summary["notes"]} & {*b.summary["notes"]}
    yield from (note for note in a.summary["notes"] if note in on_both and note.startswith(IDLE))
    for side in (a, b):
        for note in side.summary["notes"]:
            if note != NOTE and not note.startswith(IDLE):
                yield f"{side.letter}: {note}"


def _by_severity(one: Difference) -> tuple[Any, ...]:
    return not one.counts, SEVERITIES.index(one.severity), one.side == "A", one.fingerprint  # type: ignore[arg-type]


def _combinations(one: CaseSeen) -> set[Combination]:
    return {(one.recipe, arm, one.model) for arm in one.arms}


def _rules(pairs: Iterable[tuple[CaseSeen, CaseSeen]]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for one, other in pairs:
        counted.update(_names(one.rules) & _names(other.rules))
    return dict(sorted(counted.items()))


def _names(rules: Mapping[str, Sequence[str]]) -> set[str]:
    return {name for names in rules.values() for name in names}


def _bits(pairs: Iterable[tuple[CaseSeen, CaseSeen]]) -> Bits:
    compared: Counter[Kind] = Counter(dict.fromkeys(KINDS, 0))
    differ: Counter[Kind] = Counter(dict.fromkeys(KINDS, 0))
    cases, first = 0, ""
    for one, other in pairs:
        other_results, before = other.results, differ.total()
        for arm in one.results.keys() & other_results.keys():
            for kind, names in _paired(one.results[arm], other_results[arm]).items():
                compared[kind] += len(names)
                unlike = sorted(name for name, alike in names.items() if not alike)
                differ[kind] += len(unlike)
                if unlike and not first:
                    first = f"{unlike[0]} on {arm}, {one.recipe}, {one.model}, case {one.case}"
        cases += differ.total() > before
    return Bits(dict(compared), dict(differ), cases, first)


def _paired(one: Hashes, other: Hashes) -> dict[Kind, dict[str, bool]]:
    """Per kind: the name of each result that either side has -> whether both have the same hash."""
    return {
        kind: {
            name: one.get(kind, {}).get(name) == other.get(kind, {}).get(name)
            for name in {*one.get(kind, {}), *other.get(kind, {})}
        }
        for kind in KINDS
    }


def _alone(side: SideRun, other: SideRun) -> Iterable[Difference]:
    """The differences that only this side shows. One that is part of another finding is reported
    with that finding; one that its process had no time to triage is suspected."""
    one_sided = shown_alone(side.seen, other.seen) | (side.rows.keys() - side.causes.keys())
    for name in sorted(one_sided - other.causes.keys() - other.rows.keys()):
        cases = side.causes.get(name, [])
        if name in side.rows:
            row = side.rows[name]
            same = {one.name: row[one.name] for one in fields(Difference) if one.name in row}
            files = {kind: f"{side.letter}/{row[kind]}" for kind in ("case", "script")}
            yield Difference(**same | files, side=side.letter, cases=max(len(cases), 1))
        elif name not in side.parts:
            first = cases[0]
            cause = first.causes[name]
            yield Difference(
                name,
                side.letter,
                "suspected",
                "low",
                cause.sentence,
                first.recipe,
                cause.arm,
                len(cases),
                case=side.case(first),
                why_suspected="its process ended before it was looked into",
            )


def _common(a: SideRun, b: SideRun) -> list[Common]:
    """The divergences that cases of both sides show, and findings of both that no case shows."""
    found = [_both(name, a, b) for name in sorted(a.causes.keys() & b.causes.keys())]
    for name in sorted((a.rows.keys() & b.rows.keys()) - {one.fingerprint for one in found}):
        row = a.rows[name]  # a lost process is reported by the run, not by a case
        found.append(
            Common(
                name,
                (row["sentence"], b.rows[name]["sentence"]),
                row["recipe"],
                row["arm"],
                (1, 1),
                f"A/{row['case']}",
            )
        )
    return found


def _both(name: str, a: SideRun, b: SideRun) -> Common:
    on_a, on_b = a.causes[name], b.causes[name]
    of_b = {one.case: one for one in on_b}
    same = next((one for one in on_a if one.case in of_b), None)
    first = same or on_a[0]
    second = of_b[first.case] if same else on_b[0]
    return Common(
        name,
        (first.causes[name].sentence, second.causes[name].sentence),
        first.recipe,
        first.causes[name].arm,
        (len(on_a), len(on_b)),
        a.case(first),
    )


def _by_ledger(side: SideRun, other: SideRun) -> Iterator[tuple[str, CaseSeen, frozenset[str]]]:
    """Each fingerprint that this side shows and only the other side's ledger explains, on the same
    bits; the case; and the ids of the entries that explain it."""
    for key, one in side.by_draw.items():
        for name in one.causes:
            if entries := known_there(one, name, other.by_draw.get(key)):
                yield name, one, entries


def _known_on_one(side: SideRun, other: SideRun) -> Iterator[Common]:
    """The divergences that this side shows as new and the other side's ledger explains."""
    apart = other.causes.keys() | shown_alone(side.seen, other.seen)
    found: dict[str, tuple[CaseSeen, frozenset[str]]] = {}
    for name, one, entries in _by_ledger(side, other):
        if name not in apart:
            found.setdefault(name, (one, entries))
    for name, (one, entries) in sorted(found.items(), key=lambda item: item[0]):
        cause, n = one.causes[name], len(side.causes[name])
        sentences = (cause.sentence, f"the same, known as {', '.join(sorted(entries))}")
        yield Common(
            name,
            sentences if side.letter == LETTERS[0] else sentences[::-1],
            one.recipe,
            cause.arm,
            (n, n),
            side.case(one),
        )


def _known(a: SideRun, b: SideRun, pairs: Sequence[tuple[CaseSeen, CaseSeen]]) -> list[Known]:
    """The known issues of the cases that both sides judged: other cases prove no difference."""
    by_side = (*_by_ledger(a, b), *_by_ledger(b, a))
    by_ledger = {entry for *_, entries in by_side for entry in entries}
    on_a, on_b = (Counter(name for pair in pairs for name in pair[i].known) for i in (0, 1))
    return [
        Known(name, (on_a[name], on_b[name]), name in by_ledger) for name in sorted({*on_a, *on_b})
    ]
