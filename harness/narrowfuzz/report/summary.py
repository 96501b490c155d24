"""Text printed at the end of a run: findings, known issues, and how often each rule judged."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from narrowfuzz.case.arm import Arm
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.draw.coverage import Pair, missing, table
from narrowfuzz.ledger.ledger import Entry
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Model
from narrowfuzz.recipe.recipe import in_short
from narrowfuzz.report.explanation import saved_answer_lines
from narrowfuzz.report.glossary import KNOWN, NOT_FILTERED
from narrowfuzz.report.judged import JUDGED, Judged
from narrowfuzz.report.outcome import Ended
from narrowfuzz.report.tally import Tally, counted
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.texts import title_of
from narrowfuzz.trace.words import few, plural
from narrowfuzz.triage.finding import Finding, report
from narrowfuzz.triage.trials import Answer, trials_line

_RULE_WIDTH, _CELL_WIDTH = 29, 18
_TABLE = "checked / inconclusive / not applicable"
#: The most known issues named that did not show, and combinations that were never judged.
_NOT_SHOWN, _NEVER = 6, 6
#: The most linears named for each reason why they were not checked one by one.
_NAMED = 4


def rule_counts(counts: Counter[Any]) -> dict[str, dict[str, list[int]]]:
    """rule -> recipe -> [judged, inconclusive, not applicable]."""
    found: dict[str, dict[str, list[int]]] = {}
    for rule, recipe, status in counted(counts, "rule"):
        cell = found.setdefault(rule, {}).setdefault(recipe, [0, 0, 0])
        place = 0 if status in JUDGED else 1 if status == "inconclusive" else 2
        cell[place] += counts["rule", rule, recipe, status]
    return found


def pairs_seen(counts: Counter[Any]) -> frozenset[Pair]:
    """The pairs of features that occurred together in some case."""
    return frozenset(pair for (pair,) in counted(counts, "pair"))


def trials_seen(counts: Counter[Any]) -> dict[str, Answer]:
    """Entry -> the answer of its script, for the entries that were tried."""
    return dict(answer for (answer,) in counted(counts, "trial"))


def print_summary(
    console: Console, around: Console, ended: Ended, *, verbose: bool = False
) -> None:
    """Print the verdict and the findings on ``console``, and on ``around`` what was judged and the
    known issues; with ``verbose`` also the tables of rules and pairs."""
    tally, store, ledger = ended.tally, ended.store, ended.ledger
    if warning := ended.soundness():
        console.print(f"\n[bold]{escape(warning)}[/]")
    console.print(f"\n[bold]{escape(ended.verdict())}[/]")
    _print_judged(console, around, ended)
    for finding in store.findings():
        _print_finding(console, ended, finding)
    for finding in store.suspected():
        console.print(
            f"[yellow]not reproduced in a fresh process[/] {finding.id}: "
            f"{escape(finding.sentence)}: {escape(finding.why_suspected)}"
        )
    for note in ended.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    if not ended.filtered and store.findings():
        around.print(f"\n{escape(NOT_FILTERED)}")
    _print_known(around, ended)
    if not ended.subject:  # a run on a user's model has printed these at its start
        head = "Known issues that may affect you, and did not show in this run:"
        print_applying(around, ended.not_shown, head, ended.list_known)
    if verbose:
        if line := trials_line(trials_seen(tally.counts), len(ledger.unnamed)):
            around.print(line)
        _print_rules(around, tally.counts)
        _print_pairs(around, tally, ended.whole)
    page = escape(str(store.out / "report.html"))
    folders = [store.out / "findings" / finding.id for finding in store.findings()]
    if folders and not any(map(saved_answer_lines, folders)):
        command = shlex.join(["narrowfuzz", "explain", str(folders[0]), *ended.options])
        around.print(f"\nWhat it needs, and what makes it go away: {escape(command)}")
    around.print(f"\nOutput: {escape(str(store.out))}; the page: {page}")
    if ended.lacking and not ended.accepted.counting(store.findings()):
        console.print(f"Not enough was checked: {escape('; '.join(ended.lacking))}")


def _print_finding(console: Console, ended: Ended, finding: Finding) -> None:
    console.print()
    if why := ended.accepted.why(finding):
        console.print(f"[dim]does not count: {escape(why)}[/]")
    folder = ended.store.out / "findings" / finding.id
    text = report(finding, ended.replay(finding))
    console.print(escape(f"{text}\n  script: {folder / 'repro.py'}"))
    for line in saved_answer_lines(folder):
        console.print(escape(f"  {line}"), soft_wrap=True)
    like = ended.like(finding)
    if like and not finding.known_issue:  # a known issue is named in ``text``
        console.print(f"  {escape(like)}")
    for other in ended.store.sightings(finding.id):
        console.print(f"  also seen as: {escape(other.sentence)} ({other.id})")


def _print_judged(console: Console, around: Console, ended: Ended) -> None:
    counts, tally, never = ended.tally.counts, ended.tally, ended.share.never
    names = few([" ".join(one) for one in never], _NEVER)
    rest = f"; not checked: {escape(names)}" if never else ""
    console.print(f"{ended.judged()}{rest}")
    _print_layers(around, ended.share)
    digest = f"; digest of the cases: {tally.digest}" if ended.counted else ""
    around.print(
        f"{plural(counts['cases'], 'case')} of {plural(counts['specs'], 'configuration')}, "
        f"{plural(counts['compiles'], 'compile')}, in {tally.seconds:.0f} s{digest}"
    )
    if counts["corpus"]:
        around.print(f"{plural(counts['corpus'], 'configuration')} from the corpus, or near it")


def _print_layers(console: Console, share: Judged) -> None:
    """Print which linears of a user's model were judged one by one."""
    own = {name: model.linears for name, model in MODELS.items() if model.own}
    for recipe, arm, name in sorted(one for one in share.met if one[2] in own):
        every = own[name]
        seen = [layer for layer in every if layer in share.layers[recipe, arm, name]]
        how = f"  {in_short(recipe)}, {ARMS[arm].words}:"
        if ARMS[arm].sharded:
            console.print(escape(f"{how} compared with one process, a batch for each rank"))
            continue
        line = f"{how} {len(seen)} of {plural(len(every), 'linear')} checked one by one"
        rest: defaultdict[str, list[str]] = defaultdict(list)
        for layer in every:
            if layer not in seen:
                rest[_why_not(layer, MODELS[name], ARMS[arm])].append(layer.removeprefix("model."))
        line += "".join(f"; {why}: {few(layers, _NAMED)}" for why, layers in rest.items())
        console.print(escape(line))


def _why_not(layer: str, model: Model, arm: Arm) -> str:
    """Why this linear was not checked by itself on this arm, as far as it is known."""
    if layer in model.only_read:
        return "never called, other functions read the parameters"
    if layer not in {product.layer for product in model.products}:
        return "not called with what the model is built with"
    if arm.compiler:
        return "inside of compiled code"
    if layer in model.own_forwards:
        return "with a forward of its own"
    regions = model.regions or (layer,)
    if arm.checkpoint and not any(f"{layer}.".startswith(f"{one}.") for one in regions):
        return "not recomputed"
    return "not one by one"


def _print_rules(console: Console, counts: Counter[Any]) -> None:
    counted = rule_counts(counts)
    recipes = sorted({r for row in counted.values() for r in row})
    at_once = max(1, (console.width - _RULE_WIDTH) // _CELL_WIDTH)
    for start in range(0, len(recipes), at_once):
        shown = recipes[start : start + at_once]
        view = Table(title=_TABLE, title_justify="left", box=None)
        view.add_column("rule", no_wrap=True, width=_RULE_WIDTH)
        for recipe in shown:
            view.add_column(recipe.removeprefix("torchao."), justify="right", no_wrap=True)
        for rule in BY_NAME.values():
            row = counted.get(rule.name, {})
            if not any(r in row for r in shown):
                continue
            cells = ["/".join(map(_short, row[r])) if r in row else "-" for r in shown]
            view.add_row(f"{rule.name} {title_of(rule.name)}", *cells)
        console.print(view, soft_wrap=False)


def _print_pairs(console: Console, tally: Tally, whole: frozenset[Pair]) -> None:
    seen = pairs_seen(tally.counts)
    view = Table(title="pairs of features in one case", title_justify="left", box=None)
    view.add_column("", no_wrap=True)
    view.add_column("seen", justify="right")
    view.add_column("of", justify="right")
    for name, count, there in table(seen & whole, whole):
        view.add_row(name, str(count), str(there))
    console.print(view, soft_wrap=False)
    after = ", ".join(f"{count} after {at} s" for at, count in tally.pairs_after.items())
    if after:
        console.print(f"seen in all: {after}")
    never = missing(seen, whole)
    if never:
        console.print(f"never seen: {escape(few(never, 12))}")


def _short(n: int) -> str:
    return str(n) if n < 10_000 else f"{n / 1000:.0f}k"


def print_applying(console: Console, applying: Sequence[Entry], head: str, command: str) -> None:
    """Print known issues that may show; ``command`` lists all of them."""
    if not applying:
        return
    console.print(f"\n{head}")
    for entry in applying[:_NOT_SHOWN]:
        _print_issue(console, entry)
    if len(applying) > _NOT_SHOWN:
        console.print(
            f"  and {len(applying) - _NOT_SHOWN} more: the page of the run lists them; whatever the"
            f" model is like: {escape(command)}"
        )


def _print_known(console: Console, ended: Ended) -> None:
    if ended.known:
        console.print(f"\n{KNOWN}")
    for entry, _ in ended.known:
        _print_issue(
            console, entry, f", {ended.how_often(entry)}", f". Script: {_relative(entry.path)}"
        )


def _print_issue(console: Console, entry: Entry, how_often: str = "", script: str = "") -> None:
    console.print(
        f"  {entry.id} ({entry.severity}{how_often}): {escape(entry.title)}. "
        f"[dim]What helps: {escape(entry.workaround)}{escape(script)}[/]"
    )


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
