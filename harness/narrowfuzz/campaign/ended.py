"""A run that has ended: what came of it, in sentences that terminal and Markdown share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowfuzz.campaign.accepted import Accepted
from narrowfuzz.campaign.judged import Judged
from narrowfuzz.campaign.store import Store
from narrowfuzz.campaign.supervisor import Tally
from narrowfuzz.coverage import Pair
from narrowfuzz.ledger import Entry, Ledger
from narrowfuzz.severity import SEVERITIES
from narrowfuzz.triage.finding import Finding, replay_command


@dataclass(frozen=True)
class Ended:
    """What came of a run, and what it was asked for."""

    tally: Tally
    store: Store
    ledger: Ledger
    #: What was judged of what was asked for and can run here.
    share: Judged
    #: What does not make it fail.
    accepted: Accepted
    #: The pairs of features that the chosen recipes and arms could have met.
    whole: frozenset[Pair] = frozenset()
    #: What a replay needs besides the finding's folder.
    options: Sequence[str] = ()
    #: The entries that what was asked for may show, and the command that lists them.
    applying: Sequence[Entry] = ()
    list_known: str = "narrowfuzz list known"
    #: The number of cases was given, so that another run may have the same.
    counted: bool = False
    #: Per cent of the combinations that were to be judged.
    min_judged: float = 0.0
    #: The user's model that it is about, and how many cases come before others.
    subject: str = ""
    first: int = 0

    @property
    def known(self) -> list[tuple[Entry, int]]:
        """The entries that explained something, and how often."""
        hits = hits_of(self.tally.counts)
        entries = (*self.ledger.entries, *self.ledger.unnamed)
        return [(entry, hits[entry.id]) for entry in entries if entry.id in hits]

    @property
    def notes(self) -> list[str]:
        """What could not be done, and what of the file of accepted findings is out of date."""
        cut = ["cut off: not all that was asked for was judged"] * self.tally.interrupted
        return [*cut, *self.tally.notes, *self.accepted.stale(self.seen)]

    @property
    def seen(self) -> list[Finding]:
        """All that was found and suspected."""
        return [*self.store.findings(), *self.store.suspected()]

    def replay(self, finding: Finding) -> str:
        """The command that runs a finding again."""
        return replay_command(self.store.out / "findings" / finding.id, self.options)

    def soundness(self) -> str:
        """Whether the user's model is sound, "" without one."""
        subject, counts = self.subject, self.tally.counts
        if not subject:
            return ""
        if found := self.accepted.counting(self.store.findings()):
            return f"{subject} is not sound: {found[0].sentence}"
        if not counts["cases"]:
            return f"{subject}: nothing was judged, give it more --minutes"
        if counts["first"] < self.first:
            ran = f"{counts['first']} of the first {self.first} cases ran"
            return f"{subject}: {ran}, give it more --minutes"
        if self.store.findings():
            return f"{subject} shows nothing that counts: what it shows is accepted"
        if hits := hits_of(counts):
            return f"{subject} shows nothing new, but known divergences: {', '.join(sorted(hits))}"
        return f"{subject} is sound in all that was judged"

    def verdict(self) -> str:
        """How much was found."""
        found, suspected = self.store.findings(), self.store.suspected()
        left = sum(bool(self.accepted.why(finding)) for finding in self.seen)
        by_severity = Counter(finding.severity for finding in found)
        words = ", ".join(f"{by_severity[s]} {s}" for s in SEVERITIES if by_severity[s])
        return (
            f"New findings: {len(found)}{f' ({words})' if words else ''}; "
            f"suspected, without a script that shows them: {len(suspected)}."
            f"{f' {left} of them do not count.' if left else ''}"
        )

    def _too_little(self) -> str:
        enough = self.share.share >= self.min_judged
        return "" if enough else f", and --min-judged asks for {self.min_judged:g}"

    def judged(self) -> str:
        """How much was judged."""
        met, share = len(self.share.met), self.share
        said = (
            f"Judged: {met} of {met + len(share.never)} combinations of recipe, arm and model that "
            f"can run here ({share.share:.0f} %{self._too_little()})"
        )
        if self.tally.counts["cases"]:
            return said
        return f"Nothing was judged: this run says nothing. {said}"


def hits_of(counts: Mapping[Any, int]) -> dict[str, int]:
    """How often each entry explained something."""
    return {key[1]: n for key, n in counts.items() if isinstance(key, tuple) and key[0] == "known"}
