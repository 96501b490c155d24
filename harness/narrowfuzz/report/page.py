"""``report.html``: a run's findings, what was judged and what was not, as one page that needs no
network.

Everything that came from outside (names, messages, scripts) is escaped by the template's engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from narrowfuzz.case.ladder import BY_NAME, climb
from narrowfuzz.ledger.ledger import KINDS, Entry
from narrowfuzz.ledger.severity import SEVERITIES
from narrowfuzz.models.catalog import title_of
from narrowfuzz.report.explanation import saved_answer_lines
from narrowfuzz.report.glossary import NOT_FILTERED, explained, new_and_known
from narrowfuzz.report.judged import Judged
from narrowfuzz.report.nearest import Near, looks_like, nearest
from narrowfuzz.report.outcome import Ended
from narrowfuzz.report.plots import heat_map, heat_text, histogram, histogram_text
from narrowfuzz.report.template import rendered
from narrowfuzz.rules import BY_NAME as BY_RULE
from narrowfuzz.rules.texts import rows_of
from narrowfuzz.trace.meaning import located
from narrowfuzz.trace.words import plural
from narrowfuzz.triage.finding import (
    FLAKE_WORDS,
    Finding,
    backend_of,
    conditions,
    configuration_of,
    effect_words,
    example_of,
    model_words,
    needed,
    needed_title,
    promise_of,
    seen_on,
    smallest_of,
)

#: A script is shown with lines of at most ``_LINE`` characters, and at most ``_LINES`` lines each
#: from its beginning and its end.
_LINE, _LINES = 200, 150
WORDS_OF = {name: arm.words for name, arm in BY_NAME.items()}


@dataclass(frozen=True)
class Shown:
    """A finding, and what the page shows with it."""

    finding: Finding
    script: str
    why_not: str
    #: The command that replays it.
    replay: str
    #: Other sightings of the same cause.
    also: tuple[Finding, ...]
    #: An SVG of its state over the events of the training; "" for a finding without state.
    picture: str
    #: What it needs and what makes it go away, line by line; empty unless it was explained.
    causes: tuple[str, ...]
    #: The known issue that it is, or else the nearest of those that resemble it.
    known: Entry | None
    near: list[Near]
    #: The arms that its case runs on, in order.
    rungs: tuple[str, ...]


#: Names that the template uses, beside those of ``write_page``.
_NAMES: dict[str, Any] = {
    "rule": rows_of,
    "configuration": configuration_of,
    "example": example_of,
    "effect": effect_words,
    "conditions": conditions,
    "words": WORDS_OF,
    "plural": plural,
    "title_of": title_of,
    "seen_on": seen_on,
    "flake_words": FLAKE_WORDS,
    "promise": promise_of,
    "needed": needed,
    "needed_title": needed_title,
    "kinds": KINDS,
    "smallest": smallest_of,
    "model_words": model_words,
    "looks_like": looks_like,
    "new_and_known": new_and_known,
    "not_filtered": NOT_FILTERED,
    "backend": backend_of,
    "located": located,
    "heat_map": heat_map,
    "heat_text": heat_text,
    "histogram": histogram,
    "histogram_text": histogram_text,
    "severities": SEVERITIES,
}


def write_page(ended: Ended, summary: dict[str, Any], environment: dict[str, Any]) -> None:
    """Write ``report.html`` to the run's folder."""
    store, share = ended.store, ended.share
    found = store.findings()
    html = rendered(
        __package__,
        "page.html.j2",
        **_NAMES,
        ruled=_ruled,
        term=_term,
        found=[_shown(ended, finding) for finding in found],
        suspected=[_shown(ended, finding) for finding in store.suspected()],
        summary=summary,
        environment=environment,
        share=share,
        matrix=_matrix(share),
        checked_arms=[arm for arm in BY_NAME if any(arm == checked for _, checked, _ in share.met)],
        head=_head(environment, share),
        known=ended.known,
        how_often=ended.how_often,
        all_found=found,
        applying=ended.not_shown,
        changed=ended.accepted.changed(store.fingerprints()),
    )
    (store.out / "report.html").write_text(html)


def _shown(ended: Ended, finding: Finding) -> Shown:
    store, entries = ended.store, ended.entries
    folder = store.out / "findings" / finding.id
    script, picture = folder / "repro.py", folder / "state.svg"
    known = next((entry for entry in entries if entry.id == finding.known_issue), None)
    return Shown(
        finding,
        _shortened(script.read_text()) if script.is_file() else "",
        ended.accepted.why(finding),
        ended.replay(finding),
        tuple(store.sightings(finding.id)),
        picture.read_text() if picture.is_file() else "",
        saved_answer_lines(folder),
        known,
        [] if known else nearest(finding, entries),
        tuple(arm.name for arm in climb(finding.minimal.spec)),
    )


def _shortened(script: str) -> str:
    """A script with long lines and most of its middle cut: that is data, and is in its file."""
    lines = []
    for line in script.splitlines():
        rest = len(line) - _LINE
        lines.append(f"{line[:_LINE]} ... and {rest} characters more" if rest > _LINE else line)
    if len(lines) > 2 * _LINES:
        omitted = f"# ... {len(lines) - 2 * _LINES} lines: they are in the file ..."
        lines = [*lines[:_LINES], omitted, *lines[-_LINES:]]
    return "\n".join(lines)


def _head(environment: dict[str, Any], share: Judged) -> str:
    """The first line: what was tested, on what."""
    versions, device = environment["versions"], environment.get("device", {}).get("name", "cpu")
    packages = {
        "narrowfuzz": "narrowfuzz",
        "torch": "torch",
        "torchao": "torchao",
        "transformer_engine": "TransformerEngine",
    }
    parts = [
        f"{name} {versions[package]}"
        for package, name in packages.items()
        if versions.get(package, "absent") != "absent"
    ]
    parts += [f"device {device}"] if device != "cpu" else ["CPU only"]
    recipes = {recipe for recipe, _, _ in (*share.met, *share.never)}
    if device == "cpu" and any("mxfp8" in recipe for recipe in recipes):
        parts.append("MXFP8 emulated by torchao (CPUs have no MX instructions)")
    return ", ".join(parts)


def _matrix(share: Judged) -> dict[str, dict[str, tuple[int, int]]]:
    """recipe -> arm -> (models judged, models that can run)."""
    cells: dict[str, dict[str, tuple[int, int]]] = {}
    for combinations, met in ((share.met, 1), (share.never, 0)):
        for recipe, arm, _ in combinations:
            row = cells.setdefault(recipe, {})
            judged, there = row.get(arm, (0, 0))
            row[arm] = judged + met, there + 1
    return cells


#: Names of rules, and of the two bounds, that may occur in the text of a rule.
_NUMBERED = [name for name in BY_RULE if name[-1].isdigit()]
_NAMED = re.compile(rf"\b(?:{'|'.join(_NUMBERED)}|bound 3\.[23])\b")


def _ruled(text: str, besides: str) -> Markup:
    """The text of a rule, with an explanation at each name of a rule or bound but ``besides``."""
    parts, last = [], 0
    for found in _NAMED.finditer(text):
        name = found.group()
        parts += [escape(text[last : found.start()]), name if name == besides else _term(name)]
        last = found.end()
    return Markup("").join([*parts, escape(text[last:])])


def _term(word: str) -> str:
    """A term that shows its meaning when it is pointed at, focused or pressed; plain text if it has
    none."""
    meaning = explained(word)
    if not meaning:
        return word
    return Markup('<button type="button" class="term" data-means="{}">{}</button>').format(
        meaning, word
    )
