"""``report.html``: a run as one page without a network: what was found, judged, and left out.

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
from narrowfuzz.report.causes import asked_in
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
    promise_of,
    seen_on,
    smallest_of,
)

#: Of a script: the longest line that is shown whole, and how many lines at its begin and end.
_LINE, _LINES = 200, 150
WORDS_OF = {name: arm.words for name, arm in BY_NAME.items()}


@dataclass(frozen=True)
class Shown:
    """A finding, and what stands beside it on the page."""

    finding: Finding
    script: str
    why_not: str
    #: The command that runs it again.
    replay: str
    also: tuple[Finding, ...]
    #: Its state over the events, drawn; "" where it keeps none.
    picture: str
    #: What it needs and what makes it go away, line by line; none where that was not asked.
    causes: tuple[str, ...]
    #: The entry of the ledger that it is, or, of those that resemble it, the nearest.
    known: Entry | None
    near: list[Near]
    #: The arms that its case runs on, in order.
    rungs: tuple[str, ...]


#: What the template calls by name.
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
    """Write it beside the rest of a run."""
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
        checked_arms=[arm for arm in BY_NAME if any(arm == met for _, met, _ in share.met)],
        head=_head(environment, share),
        known=ended.known,
        all_found=found,
        applying=ended.unmet,
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
        asked_in(folder),
        known,
        [] if known else nearest(finding, entries),
        tuple(arm.name for arm in climb(finding.minimal.spec)),
    )


def _shortened(script: str) -> str:
    """A script without most of its data, which nobody reads: they are in its file."""
    lines = []
    for line in script.splitlines():
        rest = len(line) - _LINE
        lines.append(f"{line[:_LINE]} ... and {rest} characters more" if rest > _LINE else line)
    if len(lines) > 2 * _LINES:
        left = f"# ... {len(lines) - 2 * _LINES} lines: they are in the file ..."
        lines = [*lines[:_LINES], left, *lines[-_LINES:]]
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
    said = [
        f"{name} {versions[package]}"
        for package, name in packages.items()
        if versions.get(package, "absent") != "absent"
    ]
    said += [f"device {device}"] if device != "cpu" else ["CPU only"]
    recipes = {recipe for recipe, _, _ in (*share.met, *share.never)}
    if device == "cpu" and any("mxfp8" in recipe for recipe in recipes):
        said.append("MXFP8 emulated by torchao (CPUs have no MX instructions)")
    return ", ".join(said)


def _matrix(share: Judged) -> dict[str, dict[str, tuple[int, int]]]:
    """recipe -> arm -> (models judged, models that can run)."""
    cells: dict[str, dict[str, tuple[int, int]]] = {}
    for combinations, met in ((share.met, 1), (share.never, 0)):
        for recipe, arm, _ in combinations:
            row = cells.setdefault(recipe, {})
            judged, there = row.get(arm, (0, 0))
            row[arm] = judged + met, there + 1
    return cells


#: Rules and proofs that the text of a rule names.
_NUMBERED = [name for name in BY_RULE if name[-1].isdigit()]
_NAMED = re.compile(rf"\b(?:{'|'.join(_NUMBERED)}|bound 3\.[23])\b")


def _ruled(text: str, besides: str) -> Markup:
    """The text of a rule, in which the names of others, not ``besides``, say what they mean."""
    parts, last = [], 0
    for found in _NAMED.finditer(text):
        name = found.group()
        parts += [escape(text[last : found.start()]), name if name == besides else _term(name)]
        last = found.end()
    return Markup("").join([*parts, escape(text[last:])])


def _term(word: str) -> str:
    """A word that says what it means when it is pointed at, focused or pressed."""
    meaning = explained(word)
    if not meaning:
        return word
    return Markup('<button type="button" class="term" data-means="{}">{}</button>').format(
        meaning, word
    )
