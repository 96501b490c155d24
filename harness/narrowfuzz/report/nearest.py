"""Which entries of the ledger resemble a finding that none of them explains."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from narrowfuzz.case.arm import Arm
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.ledger.ledger import Entry
from narrowfuzz.triage.finding import Finding

#: How many are named, and the least that what one has in common with the finding must weigh; the
#: rule or the symptom is among it.
MOST, LEAST = 3, 6
_PARTS = ("rule", "role", "arm", "symptom", "recipe family")
_WEIGHT = {"rule": 3, "symptom": 3, "recipe": 2, "recipe family": 2, "kind of arm": 1, "role": 1}


@dataclass(frozen=True)
class Near:
    """An entry, and in what it is like the finding."""

    entry: Entry
    reasons: tuple[str, ...]

    #: The finding's recipe and whole fingerprint are what the entry speaks of.
    whole: bool = False

    def __str__(self) -> str:
        return ", ".join(f"same {reason}" for reason in self.reasons)


def nearest(finding: Finding, entries: Iterable[Entry]) -> list[Near]:
    """Those that resemble it most, the nearest first."""
    found = [
        Near(entry, tuple(_reasons(finding, entry)), _whole(finding, entry)) for entry in entries
    ]
    alike = [n for n in found if _weight(n.reasons) >= LEAST and {"rule", "symptom"} & {*n.reasons}]
    return sorted(alike, key=lambda near: (-_weight(near.reasons), near.entry.id))[:MOST]


def looks_like(near: Iterable[Near]) -> str:
    """The nearest entry that speaks of a finding's whole fingerprint, "" if none does: whether its
    conditions hold, too, nobody has asked."""
    return next((one.entry.id for one in near if one.whole), "")


def _whole(finding: Finding, entry: Entry) -> bool:
    return entry.about(finding.recipe) and any(
        fnmatch.fnmatchcase(finding.fingerprint, glob) for glob in entry.fingerprints
    )


def _weight(reasons: Iterable[str]) -> int:
    return sum(_WEIGHT[reason] for reason in reasons)


def _reasons(finding: Finding, entry: Entry) -> Iterator[str]:
    """What the finding has in common with one of the fingerprints that the entry is about."""
    shared = (_in_common(finding, glob) for glob in entry.fingerprints)
    yield from max(shared, key=_weight, default=[])
    if any(fnmatch.fnmatch(finding.recipe, glob) for glob in entry.recipes if glob.strip("*")):
        yield "recipe"


def _in_common(finding: Finding, glob: str) -> list[str]:
    """The parts of a fingerprint that the glob spells out, and that are the finding's."""
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
    """The arms that a glob names; none where it names all."""
    return [arm for name, arm in BY_NAME.items() if glob != "*" and fnmatch.fnmatch(name, glob)]


def _alike(one: Arm, other: Arm) -> bool:
    kinds = [(arm.compiled, arm.recomputes, arm.native) for arm in (one, other)]
    return kinds[0] == kinds[1]
