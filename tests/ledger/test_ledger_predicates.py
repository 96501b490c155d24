"""No entry hides another bug: beside each, an unrelated failure is planted and must be reported."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import pytest
from narrowfuzz.case.spec import Case, Clipping, DataSpec, Spec, ValueClass
from narrowfuzz.ledger.facts import FACTS, Context
from narrowfuzz.ledger.ledger import Entry, Match, load_entries
from narrowfuzz.machine.machine import Machine

ENTRIES = load_entries()
#: The pieces of a fingerprint: rule, role, arm, symptom, family.
_RULE, _SYMPTOM = 0, 3


def matches() -> Iterator[Any]:
    for entry in ENTRIES:
        for i, match in enumerate(entry.matches):
            yield pytest.param(entry, match, id=f"{entry.id}-{i}")


def concrete(glob: str) -> str:
    """A fingerprint that the glob matches, made of invented words."""
    return glob.replace("*", "anything")


@pytest.mark.parametrize(("entry", "match"), matches())
def test_another_rule_or_symptom_is_not_explained(entry: Entry, match: Match) -> None:
    """Where an entry has a cure, that tells one symptom from another: each case is run under it."""
    for glob in match.fingerprints:
        pieces = concrete(glob).split("--")
        assert len(pieces) == 5, glob
        for piece in (_RULE,) if entry.cure or match.cure else (_RULE, _SYMPTOM):
            other = [*pieces]
            other[piece] = "an invented failure"
            name = "--".join(other)
            assert not any(fnmatch.fnmatchcase(name, g) for g in match.fingerprints), name


@pytest.mark.parametrize(("entry", "match"), matches())
def test_the_same_symptom_for_another_reason_is_not_explained(entry: Entry, match: Match) -> None:
    """Each of the conditions can fail, so a case or a message that lacks one is reported; and so
    can a cure."""
    conditions = {**entry.when, **match.when}
    literal = not any("*" in glob.split("--")[_SYMPTOM] for glob in match.fingerprints)
    crashes = any(glob.startswith("contract--") for glob in match.fingerprints)
    cured = bool(entry.cure or match.cure)
    assert conditions or literal or cured, "no literal symptom, no condition and no cure"
    if crashes and not cured:
        asks = "message" in conditions or not any("(" in g for g in match.fingerprints)
        assert asks, "a crash of one type in one function may have another reason"
    assert set(conditions) <= set(FACTS)


@pytest.mark.parametrize(
    ("clipping", "values", "explained"),
    [("norm_inf", "inf_nan", True), ("norm_inf", "gaussian", False), ("norm", "inf_nan", False)],
)
def test_a_norm_on_gloo_is_known_only_where_it_may_be_nan(
    clipping: Clipping, values: ValueClass, explained: bool
) -> None:
    case = Case(spec=Spec(recipe="torch.bf16", clipping=clipping), data=DataSpec(values=values))
    (entry,) = (entry for entry in ENTRIES if entry.id == "gloo-max-drops-nan")
    found = "S10--norm--sharded_processes--differs from threads--torch"
    context = Context(case, Machine((), "3.12.0", {}, {}))
    assert bool(entry.fitting(found, context)) is explained
    assert not entry.fitting(found.replace("norm", "output"), context)
