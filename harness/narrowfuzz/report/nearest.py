"""Which entries of the ledger resemble a finding that none of them explains."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from narrowfuzz.case.arm import Arm
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.ledger.facts import Context, unmet
from narrowfuzz.ledger.ledger import Entry
from narrowfuzz.machine.machine import machine
from narrowfuzz.triage.finding import Finding

#: The most entries that are named, and the least total weight of what an entry must have in common
#: with the finding; the rule or the symptom must be part of that.
MOST, LEAST = 3, 6
_PARTS = ("rule", "role", "arm", "symptom", "recipe family")
_WEIGHT = {"rule": 3, "symptom": 3, "recipe": 2, "recipe family": 2, "kind of arm": 1, "role": 1}


@dataclass(frozen=True)
class Near:
    """An entry, and what it has in common with the finding."""

    entry: Entry
    reasons: tuple[str, ...]

    #: True if the entry covers the finding's recipe and its whole fingerprint.
    whole: bool = False
    #: Conditions of the entry that the finding's case does not meet, in words.
    unmet: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the entry covers the fingerprint and the case. Its conditions on the machine and
        on what the rules observed are not checked."""
        return self.whole and not self.unmet

    def __str__(self) -> str:
        alike = ", ".join(f"same {reason}" for reason in self.reasons)
        return f"{alike}; but {'; '.join(self.unmet)}" if self.unmet else alike


def nearest(finding: Finding, entries: Iterable[Entry]) -> list[Near]:
    """The entries that resemble the finding most, the nearest first."""
    found = [
        Near(
            entry,
            tuple(_reasons(finding, entry)),
            _whole(finding, entry),
            _unmet(finding, entry),
        )
        for entry in entries
    ]
    alike = [n for n in found if _weight(n.reasons) >= LEAST and {"rule", "symptom"} & {*n.reasons}]
    return sorted(alike, key=lambda n: (not n.fits, -_weight(n.reasons), len(n.unmet), n.entry.id))[
        :MOST
    ]


def looks_like(near: Iterable[Near]) -> str:
    """The id of the nearest entry that covers the finding's whole fingerprint and its case; "" if
    none does."""
    return next((one.entry.id for one in near if one.fits), "")


def resemblance(near: Sequence[Near]) -> str:
    """Words that name the nearest entry, and what it lacks to match; "" if none resembles the
    finding."""
    if known := looks_like(near):
        return f"it looks like {known}"
    return f"none matches; the nearest is {near[0].entry.id} ({near[0]})" if near else ""


def _whole(finding: Finding, entry: Entry) -> bool:
    return entry.about(finding.recipe) and any(
        fnmatch.fnmatchcase(finding.fingerprint, glob) for glob in entry.fingerprints
    )


def _unmet(finding: Finding, entry: Entry) -> tuple[str, ...]:
    """Conditions of the entry that the minimal case does not meet; of the entry's matches only the
    one with the fewest unmet conditions is used."""
    context = Context(finding.minimal, machine(), finding.device)
    globs = fnmatch.fnmatchcase
    mine = [m for m in entry.matches if any(globs(finding.fingerprint, f) for f in m.fingerprints)]
    lacking = [unmet(match.when, context) for match in mine or entry.matches]
    return (*unmet(entry.when, context), *min(lacking, key=len, default=()))


def _weight(reasons: Iterable[str]) -> int:
    return sum(_WEIGHT[reason] for reason in reasons)


def _reasons(finding: Finding, entry: Entry) -> Iterator[str]:
    """What the finding has in common with the entry's closest fingerprint and with its recipes."""
    shared = (_in_common(finding, glob) for glob in entry.fingerprints)
    yield from max(shared, key=_weight, default=[])
    if any(fnmatch.fnmatch(finding.recipe, glob) for glob in entry.recipes if glob.strip("*")):
        yield "recipe"


def _in_common(finding: Finding, glob: str) -> list[str]:
    """Names of the parts of a fingerprint that the glob spells out and the finding matches."""
    wanted, own = glob.split("--"), finding.fingerprint.split("--")
    if len(wanted) != len(_PARTS) or len(own) != len(_PARTS):
        return []
    found = []
    for name, there, here in zip(_PARTS, wanted, own, strict=True):
        if name == "arm":
            if any(_alike(BY_NAME[finding.arm], arm) for arm in _named(there)):
                found.append("kind of arm")
        elif there.strip("*") and fnmatch.fnmatchcase(here, there):
            found.append(name)
    return found


def _named(glob: str) -> list[Arm]:
    """The arms that a glob names; none for "*", which names all."""
    return [arm for name, arm in BY_NAME.items() if glob != "*" and fnmatch.fnmatch(name, glob)]


def _alike(one: Arm, other: Arm) -> bool:
    kinds = [(arm.compiled, arm.recomputes, arm.native) for arm in (one, other)]
    return kinds[0] == kinds[1]
