"""The table for people, and the record for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from narrowfuzz.case import dump_case
from narrowfuzz.vacuity.measure import Table, Tally

#: A larger share than this wants a repair.
LIMIT = 0.1


def record(found: Table) -> list[dict[str, Any]]:
    """One entry for each rule and recipe, the most vacuous first."""
    return [
        {
            "oracle": oracle,
            "recipe": recipe,
            "passes": tally.passes,
            "vacuous": tally.vacuous,
            "share": round(tally.share, 4),
            "tried": dict(tally.tried),
            "missed": dict(tally.missed),
            "examples": [
                {"arm": arm, "role": role, "layer": layer,
                 "case": msgspec.json.decode(dump_case(case))}
                for case, arm, role, layer in tally.examples
            ],
        }
        for (oracle, recipe), tally in _ordered(found)
    ]  # fmt: skip


def lines(found: Table) -> Iterator[str]:
    """A line for each rule: passes, vacuous ones, and what it misses most; then one for each of
    its recipes with more than LIMIT."""
    yield f"{'rule':<9}{'passes':>8}{'vacuous':>9}{'share':>8}  missed most often"
    for oracle in sorted({oracle for oracle, _ in found}):
        rows = {recipe: tally for (name, recipe), tally in found.items() if name == oracle}
        whole = _sum(rows.values())
        yield f"{oracle:<9}{_numbers(whole)}  {_missed(whole)}"
        for recipe, tally in sorted(rows.items(), key=lambda row: -row[1].share):
            if tally.share > LIMIT:
                yield f"  {recipe:<40}{_numbers(tally).strip()}"


def _ordered(found: Table) -> list[tuple[tuple[str, str], Tally]]:
    return sorted(found.items(), key=lambda row: (-row[1].share, row[0]))


def _sum(tallies: Any) -> Tally:
    whole = Tally()
    for tally in tallies:
        whole.passes += tally.passes
        whole.vacuous += tally.vacuous
        whole.tried += tally.tried
        whole.missed += tally.missed
    return whole


def _numbers(tally: Tally) -> str:
    return f"{tally.passes:>8}{tally.vacuous:>9}{100 * tally.share:>7.1f}%"


def _missed(tally: Tally) -> str:
    shares = {name: tally.missed[name] / n for name, n in tally.tried.items() if tally.missed[name]}
    most = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in most)
