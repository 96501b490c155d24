"""``summary.md``: the results of a run as Markdown for a pull request."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.report.glossary import KNOWN, NOT_FILTERED
from narrowfuzz.trace.words import plural
from narrowfuzz.triage.finding import Finding, configuration_of

if TYPE_CHECKING:
    from narrowfuzz.report.outcome import Ended

#: Characters that are mark-up anywhere, and those that are mark-up only where a line begins.
_ANYWHERE = re.compile(r"([\\`*_\[\]<>#|~&$])")
_FIRST = re.compile(r"^(\d*)([-+=.)])")


def write_markdown(ended: Ended) -> None:
    """Write ``summary.md`` to the run's folder."""
    (ended.store.out / "summary.md").write_text("\n\n".join(_parts(ended)) + "\n")


def plain(text: str) -> str:
    """The text escaped so that it shows literally, also in a table's cell: on one line, without
    mark-up, and without notifying anyone by an @mention."""
    escaped = _FIRST.sub(r"\1\\\2", _ANYWHERE.sub(r"\\\1", " ".join(text.split())))
    return escaped.replace("@", "@<!-- -->")


def _parts(ended: Ended) -> Iterator[str]:
    yield f"## narrowfuzz: {plain(ended.soundness() or ended.verdict())}"
    if ended.subject:
        yield plain(ended.verdict())
    yield plain(ended.judged())
    if found := ended.store.findings():
        head = "| severity | finding | recipe | run | replay |\n| --- | --- | --- | --- | --- |"
        yield "\n".join([head, *(_row(ended, finding) for finding in found)])
    if suspected := ended.store.suspected():
        lines = (f"{one.sentence} ({configuration_of(one)})" for one in suspected)
        yield "Not reproduced in a fresh process:\n\n" + bullets(lines)
    if not ended.filtered:
        yield plain(NOT_FILTERED)
    if ended.known:
        lines = (
            f"{entry.id} ({entry.severity}, {ended.how_often(entry)}): {entry.title}. What helps: "
            f"{entry.workaround}"
            for entry, _ in ended.known
        )
        yield f"{KNOWN}\n\n{bullets(lines)}"
    if ended.notes:
        yield bullets(f"Note: {note}" for note in ended.notes)
    if never := ended.share.never:
        head = f"<details>\n<summary>Not checked: {len(never)}</summary>"
        yield f"{head}\n\n{bullets(_unchecked(ended))}\n\n</details>"


def _unchecked(ended: Ended) -> Iterator[str]:
    """A line per arm: how many of its combinations were not checked."""
    checked = Counter(arm for _, arm, _ in ended.share.met)
    for arm, count in Counter(arm for _, arm, _ in ended.share.never).items():
        whole = checked[arm] + count
        yield f"{arm}: {count} of {plural(whole, 'combination')} of recipe and model"


def _row(ended: Ended, finding: Finding) -> str:
    why = ended.accepted.why(finding)
    notes = filter(None, (f"does not count: {why}" if why else "", ended.like(finding)))
    sentence = finding.sentence + "".join(f" ({note})" for note in notes)
    cells = (finding.severity, sentence, finding.recipe, BY_NAME[finding.arm].words)
    replay = f"<code>{plain(ended.replay(finding))}</code>"
    return f"| {' | '.join([*map(plain, cells), replay])} |"


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list of these texts, each escaped by ``plain``."""
    return "\n".join(f"- {plain(line)}" for line in lines)
