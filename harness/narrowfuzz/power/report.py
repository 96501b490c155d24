"""Text and JSON of a score and of a measurement of vacuity."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from narrowfuzz.case.spec import dump_case
from narrowfuzz.power.probe import Passes
from narrowfuzz.power.probe import Table as Vacuity
from narrowfuzz.power.recall import WITHIN, Summary, summarise
from narrowfuzz.power.record import Change, Controlled, Hunted, Score, false_alarms

#: The share of planted faults that should be found.
GOAL = 0.95
#: A rule and recipe with a larger share of vacuous passes should be repaired.
LIMIT = 0.1


def print_fault(console: Console, fault: Hunted) -> None:
    """Print the one line of a hunt that has ended."""
    if fault.problem:
        line = f"[yellow]unusable[/]  {fault.id}: {escape(fault.problem)}"
    elif fault.found:
        line = (
            f"found     {fault.id}: {fault.seconds:.1f} s, {fault.cases} cases, {fault.rule} on "
            f"{fault.arm}, size {fault.size}: {escape(fault.fingerprint)}"
        )
    else:
        seen = f"; suspected: {', '.join(fault.suspected)}" if fault.suspected else ""
        seen += f"; {fault.miss.why}" if fault.miss else ""
        line = f"[red]missed[/]    {fault.id}: {fault.cases} cases{escape(seen)}"
    console.print(line)


def print_control(console: Console, control: Controlled) -> None:
    """Print the one line of a control that has run."""
    head = f"{control.id}: {control.cases} cases in {control.seconds:.0f} s"
    if control.problem:
        line = f"[yellow]unusable[/]  {control.id}: {escape(control.problem)}"
    elif alarms := (*control.findings, *control.suspected):
        line = f"[red]FALSE ALARM[/] {head}: {escape(', '.join(alarms))}"
        for case in control.alarms.values():
            line += f"\n    its case: {escape(bytes(case).decode())}"
    else:
        line = f"silent    {head}"
    console.print(line)


def print_summary(console: Console, score: Score, change: Change | None) -> None:
    """Print recall by family, times, missed faults and false alarms; the most important last."""
    found = summarise(score.faults)
    if score.faults:
        _print_families(console, score, found)
        _print_speeds(console, found)
    for line in _lines(score, found):
        console.print(line)
    if change is not None:
        for name, ids in (("lost", change.lost), ("gained", change.gained)):
            console.print(f"{name} since the earlier score: {', '.join(ids) or 'none'}")


def _print_families(console: Console, score: Score, found: Summary) -> None:
    view = _table("planted faults found", "family", "found", "95 % interval", "median s", "missed")
    for family, share in found.families.items():
        mine = [f for f in score.faults if f.family == family]
        times = sorted(f.seconds for f in mine if f.seconds is not None)
        missed = ", ".join(f.id for f in mine if not f.found)
        middle = f"{times[len(times) // 2]:.1f}" if times else "-"
        found_of, interval = f"{share.found} of {share.of}", f"{share.low:.0%} to {share.high:.0%}"
        view.add_row(family, found_of, interval, middle, escape(missed))
    console.print(view, soft_wrap=False)


def _print_speeds(console: Console, found: Summary) -> None:
    columns = (*(f"within {most} s" for most in WITHIN), "median", "90th percentile")
    view = _table("seconds to a verified finding", "faults", "searched for", *columns)
    for kind, speed in found.speeds.items():
        if speed.of:
            counts = [f"{n} ({n / speed.of:.1%})" for n in speed.within.values()]
            ends = _seconds(speed.median), _seconds(speed.ninetieth)
            view.add_row(kind, str(speed.of), *counts, *ends)
    console.print(view, soft_wrap=False)


def _table(title: str, *columns: str) -> Table:
    """A table in which all columns but the first and the last hold numbers."""
    view = Table(title=title, title_justify="left", box=None)
    for column in columns:
        view.add_column(column, justify="left" if column in (columns[0], columns[-1]) else "right")
    return view


def _lines(score: Score, found: Summary) -> Iterable[str]:
    if score.faults:
        yield f"all faults: {found.everything}; goal {GOAL:.0%}"
        yield f"in torch, torchao and TransformerEngine: {found.libraries}"
        yield f"in our own references: {found.references}"
        yield f"that only compiled runs show: {found.compiled}"
    suspected = sum(len(fault.suspected) for fault in score.faults)
    cut = sum(fault.cut_short for fault in score.faults)
    yield (
        f"suspected, without a script that shows them: {suspected}; besides, {cut} whose scripts "
        "had no time to run, as something was found"
    )
    if score.controls:
        cases = sum(control.cases for control in score.controls)
        alarms = false_alarms(score.controls)
        yield (
            f"[bold]false alarms: {len(alarms)}[/] on {len(score.controls)} clean controls, "
            f"{cases} cases"
        )


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f} s"


def summary_json(score: Score) -> dict[str, Any]:
    """Fields that are derived from the records, for readers of the JSON."""
    found = summarise(score.faults)

    def number(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 2)

    return {
        "summary": {
            "all": asdict(found.everything),
            "libraries": asdict(found.libraries),
            "references": asdict(found.references),
            "compiled": asdict(found.compiled),
            "families": {name: asdict(r) for name, r in found.families.items()},
            "median_seconds": number(found.median),
            "ninetieth_seconds": number(found.ninetieth),
            "compiled_slowest_seconds": number(found.compiled_slowest),
            "speeds": {
                kind: {
                    **asdict(speed),
                    "median": number(speed.median),
                    "ninetieth": number(speed.ninetieth),
                }
                for kind, speed in found.speeds.items()
            },
            "false_alarms": list(false_alarms(score.controls)),
        }
    }


def print_vacuity(console: Console, found: Vacuity) -> None:
    """Print a row for each rule (passes, vacuous passes, and the perturbations it misses most
    often), and below it a row for each recipe with a larger share than LIMIT."""
    view = _table("passes", "rule", "passes", "vacuous", "share", "missed most often")
    for rule in sorted({rule for rule, _ in found}):
        rows = {recipe: passes for (name, recipe), passes in found.items() if name == rule}
        whole = _sum(rows.values())
        view.add_row(rule, *_numbers(whole), _missed(whole))
        for recipe, passes in sorted(rows.items(), key=lambda row: -row[1].share):
            if passes.share > LIMIT:
                view.add_row(f"  {recipe}", *_numbers(passes))
    console.print(view, soft_wrap=False)


def _sum(rows: Iterable[Passes]) -> Passes:
    whole = Passes()
    for passes in rows:
        whole.number += passes.number
        whole.vacuous += passes.vacuous
        whole.tried += passes.tried
        whole.missed += passes.missed
    return whole


def _numbers(passes: Passes) -> tuple[str, str, str]:
    return str(passes.number), str(passes.vacuous), f"{100 * passes.share:.1f}%"


def _missed(passes: Passes) -> str:
    shares = {name: n / passes.tried[name] for name, n in passes.missed.items()}
    most = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in most)


def vacuity_json(found: Vacuity) -> list[dict[str, Any]]:
    """One entry for each rule and recipe, the most vacuous first."""
    return [
        {
            "rule": rule,
            "oracle": rule,  # its old name, until 0.2.0
            "recipe": recipe,
            "passes": passes.number,
            "vacuous": passes.vacuous,
            "share": round(passes.share, 4),
            "tried": dict(passes.tried),
            "missed": dict(passes.missed),
            "examples": [
                {
                    "arm": arm,
                    "role": role,
                    "layer": layer,
                    "case": msgspec.json.decode(dump_case(case)),
                }
                for case, arm, role, layer in passes.examples
            ],
        }
        for (rule, recipe), passes in sorted(found.items(), key=lambda r: (-r[1].share, r[0]))
    ]
