"""The output of a comparison: on a terminal, as Markdown, as a page, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from narrowfuzz.campaign.comparison import LETTERS, Bits, Common, Comparison, Difference, Known
from narrowfuzz.report.markdown import bullets, plain
from narrowfuzz.report.template import rendered
from narrowfuzz.rules.texts import title_of
from narrowfuzz.trace.hashes import KINDS, Kind
from narrowfuzz.trace.words import few, plural

#: Format version of ``compare.json``; raised if a field changes its meaning, not if one is added.
SCHEMA = 1
#: How many combinations that were not judged on both sides are named, and how many divergences of
#: both sides.
_NOT_JUDGED, _COMMON = 6, 10
_KINDS: dict[Kind, str] = {
    "results": "outputs and gradients",
    "operands": "operands of multiplies",
    "scales": "scales",
    "errors": "errors",
}


def verdict(comparison: Comparison) -> str:
    """One sentence: do they differ?"""
    if comparison.empty:
        return "No rule judged a case on both sides, so nothing was compared"
    found, one_sided = comparison.counting, comparison.known_on_one_side
    if not found and not one_sided:
        count = len(comparison.differences)
        if count:
            is_said = "is listed that does" if count == 1 else "are listed that do"
            return f"No difference that counts: {plural(count, 'difference')} {is_said} not"
        if any(comparison.bits.differ.values()):
            return "No rule is broken on one side alone, though bits differ"
        return "No difference: no rule is broken on one side alone"
    parts = [
        f"{plural(sum(one.side == letter for one in found), 'finding')} on {letter} alone"
        for letter in reversed(LETTERS)
    ]
    if one_sided:
        parts.append(f"{plural(len(one_sided), 'known issue')} on one side alone")
    return f"The two differ: {', '.join(parts)}"


def bits_said(bits: Bits) -> str:
    """How many results were compared bit for bit, and how many differ."""
    whole, unlike = sum(bits.compared.values()), sum(bits.differ.values())
    each = ", ".join(
        f"{bits.differ[kind]} of {bits.compared[kind]} {_KINDS[kind]}"
        for kind in KINDS
        if bits.compared[kind]
    )
    if not whole:
        return "Nothing was compared bit for bit"
    if not unlike:
        return (
            f"Bit for bit: {whole} values compared, none differs ({each}). What differs between "
            "the two installations had no effect on what was seen here"
        )
    scales = "" if bits.differ["scales"] else "; no scale differs on any case"
    return (
        f"Bit for bit: {whole} values compared, {unlike} differ in {plural(bits.cases, 'case')} "
        f"({each}){scales}; first: {bits.first}"
    )


def judged_said(comparison: Comparison) -> str:
    """How much was compared."""
    both, only_a, only_b = comparison.cases
    judged, not_judged = len(comparison.judged_on_both), len(comparison.not_judged_on_both)
    apart = f", {only_a} on A alone, {only_b} on B alone" if only_a or only_b else ""
    return (
        f"Compared: {plural(both, 'case')} on both sides{apart}; {len(comparison.rules)} rules "
        f"judged on both; {judged} of {judged + not_judged} combinations of recipe, arm and model"
    )


def lines_of(comparison: Comparison, out: Path) -> Iterator[str]:
    """The lines for a terminal, in rich's markup: the verdict and the extent of the comparison,
    then differences, known issues, and the divergences that both sides show."""
    yield f"\n[bold]{escape(verdict(comparison))}[/]"
    yield escape(bits_said(comparison.bits))
    yield escape(judged_said(comparison)) + _not_judged_said(comparison.not_judged_on_both)
    if any(comparison.cases[1:]):
        yield (
            "[yellow]the two did not judge the same cases[/]: recipes or arms that run on one do "
            "not on the other; findings compare, counts of cases do not"
        )
    for letter in reversed(LETTERS):
        mine = [one for one in comparison.differences if one.side == letter]
        yield f"[bold]only {letter}: {len(mine)}[/]"
        for one in mine:
            yield f"  {escape(difference_said(one))}"
            if one.script:
                yield f"    script: {escape(str(out / one.script))}"
    if comparison.known:
        yield f"[bold]known issues: {len(comparison.known)}[/]"
        for known in comparison.known:
            yield f"  {escape(known_said(known))}"
    yield f"[bold]both: {len(comparison.common)}[/]"
    for common in comparison.common[:_COMMON]:
        for line in common_said(common):
            yield f"  {escape(line)}"
    if len(comparison.common) > _COMMON:
        yield f"  and {len(comparison.common) - _COMMON} more"
    for note in comparison.notes:
        yield f"[yellow]note[/] {escape(note)}"


def difference_said(one: Difference) -> str:
    weight = one.severity if one.status == "new" else "suspected"
    why = f"; does not count: {one.accepted}" if one.accepted else ""
    why += f"; no script shows it: {one.why_suspected}" if one.why_suspected else ""
    place = f"{one.recipe}, {one.arm}, {plural(one.cases, 'case')}"
    return f"{one.side}, {weight}: {one.sentence} ({place}){why}"


def common_said(one: Common) -> list[str]:
    """One line, or two if the sentences of the sides differ."""
    a, b = one.sentences
    place = f"({one.recipe}, {one.arm}, {_on_both(one.cases)})"
    return [f"A, B: {a} {place}"] if a == b else [f"A: {a} {place}", f"B: {b} {place}"]


def known_said(one: Known) -> str:
    if side := one.one_side:
        return f"on {side} alone: {one.id} ({plural(max(one.cases), 'case')})"
    but = ", but the ledger names it on one side only" if one.by_ledger else ""
    return f"on both{but}: {one.id} ({_on_both(one.cases)})"


def _on_both(cases: tuple[int, int]) -> str:
    n, m = cases
    return plural(n, "case") if n == m else f"{plural(n, 'case')} on A, {m} on B"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The content of ``compare.json``, without the exit code."""
    both, only_a, only_b = comparison.cases
    return {
        "schema": SCHEMA,
        "verdict": verdict(comparison),
        "sides": [
            {
                "side": side.letter,
                "title": side.title,
                "versions": side.environment["versions"],
                "checkouts": side.environment["checkouts"],
                "cases": len(side.seen),
                "seconds": side.summary["seconds"],
            }
            for side in comparison.sides
        ],
        "cases": {"both": both, "only A": only_a, "only B": only_b},
        "rules": dict(comparison.rules),
        "combinations": [" ".join(one) for one in comparison.judged_on_both],
        "never_judged": list(comparison.not_judged_on_both),
        "bits": asdict(comparison.bits),
        "differences": [asdict(one) | {"counts": one.counts} for one in comparison.differences],
        "both": [asdict(one) for one in comparison.common],
        "known": [asdict(one) | {"one_side": one.one_side} for one in comparison.known],
        "notes": list(comparison.notes),
    }


def write_summary(comparison: Comparison, out: Path) -> None:
    """Write ``summary.md``, for a pull request."""
    (out / "summary.md").write_text("\n\n".join(_parts(comparison)) + "\n")


def write_page(comparison: Comparison, out: Path, document: dict[str, Any]) -> None:
    """Write ``report.html``, a page that needs no network, and ``compare.json`` beside it."""
    (out / "compare.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    html = rendered(
        __package__,
        "comparison.html.j2",
        verdict=verdict(comparison),
        bits=bits_said(comparison.bits),
        judged=judged_said(comparison),
        sides=comparison.sides,
        differences=[(one, _script(out, one)) for one in comparison.differences],
        common=[common_said(one) for one in comparison.common],
        known=[known_said(one) for one in comparison.known],
        rules=[(name, title_of(name), n) for name, n in comparison.rules.items()],
        judged_on_both=[" / ".join(one) for one in comparison.judged_on_both],
        not_judged_on_both=comparison.not_judged_on_both,
        notes=comparison.notes,
        same_cases=not any(comparison.cases[1:]),
    )
    (out / "report.html").write_text(html)


def _script(out: Path, one: Difference) -> str:
    file = out / one.script
    return file.read_text() if one.script and file.is_file() else ""


def _parts(comparison: Comparison) -> Iterator[str]:
    yield f"## narrowfuzz compare: {plain(verdict(comparison))}"
    yield bullets(f"{side.letter}: {side.title}: {side.versions}" for side in comparison.sides)
    yield plain(bits_said(comparison.bits))
    yield plain(judged_said(comparison))
    for head, lines in (
        ("What one side shows alone", [difference_said(one) for one in comparison.differences]),
        ("Known issues", [known_said(one) for one in comparison.known]),
        ("Shown on both sides", [line for one in comparison.common for line in common_said(one)]),
        ("Notes", comparison.notes),
    ):
        if lines:
            yield f"{head}:\n\n{bullets(lines)}"
    if rest := comparison.not_judged_on_both:
        names = bullets([*rest[:100], *([f"and {len(rest) - 100} more"] * (len(rest) > 100))])
        head = f"<summary>Not judged on both: {len(rest)}</summary>"
        yield f"<details>\n{head}\n\n{names}\n\n</details>"


def _not_judged_said(combinations: Sequence[str]) -> str:
    if not combinations:
        return ""
    return f"; not judged on both: {escape(few(combinations, _NOT_JUDGED))}"
