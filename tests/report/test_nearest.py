"""Which entries of the ledger are named beside a finding that none explains."""

from __future__ import annotations

import msgspec
from narrowfuzz.ledger.ledger import Entry, Match, load_entries
from narrowfuzz.report.nearest import MOST, looks_like, nearest, resemblance
from test_accepted import FINDING

ENTRY = next(entry for entry in load_entries() if not entry.when)


def entry(name: str, *fingerprints: str, recipes: tuple[str, ...] = ("*",)) -> Entry:
    matches = tuple(Match(fingerprints=(one,)) for one in fingerprints)
    return msgspec.structs.replace(ENTRY, id=name, matches=matches, recipes=recipes)


ALIKE = entry("alike", "O5--output--*--wrong value--torchao.float8",
              recipes=("torchao.float8.*",))  # fmt: skip


def test_the_nearest_come_first_with_their_reasons() -> None:
    others = [
        entry("eager", "O5--output--eager--wrong value--torchao.mxfp8"),
        entry("compiled", "O5--output--inductor*--wrong value--torchao.mxfp8"),
        entry("rule", "O5--*--*--*--*"),
        entry("elsewhere", "O1--output--inductor--differs on repeat--torchao.float8"),
        ALIKE,
    ]
    found = nearest(FINDING, others)
    assert [near.entry.id for near in found] == ["alike", "compiled", "eager"]
    assert str(found[0]) == "same rule, same role, same symptom, same recipe family, same recipe"
    assert found[1].reasons == ("rule", "role", "kind of arm", "symptom")


def test_what_speaks_of_the_case_comes_before_what_does_not_and_says_why() -> None:
    whole = FINDING.fingerprint
    other = msgspec.structs.replace(entry("a", whole), when={"model": "flex_*", "bias": False})
    matches = (Match(fingerprints=(whole,), when={"m": "<1"}),)
    rows = msgspec.structs.replace(entry("b", whole), matches=matches)
    mine = entry("c", whole)
    found = nearest(FINDING, [other, rows, mine])
    assert [near.entry.id for near in found] == ["c", "a", "b"]
    assert found[0].fits and looks_like(found) == "c"
    assert resemblance(found) == "it looks like c"
    assert found[1].unmet == ("model is linear, not flex_*",)
    assert found[2].unmet == (f"m is {FINDING.minimal.spec.m}, not <1",)
    assert looks_like(found[1:]) == ""
    assert resemblance(found[1:]).startswith("none matches; the nearest is a (same rule")
    assert resemblance(found[1:]).endswith("; but model is linear, not flex_*)")
    assert resemblance([]) == ""


def test_a_star_resembles_nothing() -> None:
    assert not nearest(FINDING, [entry("all", "*--*--*--*--*"), entry("none")])


def test_no_more_than_a_few_are_named() -> None:
    many = [msgspec.structs.replace(ALIKE, id=f"e{i}") for i in range(9)]
    assert [near.entry.id for near in nearest(FINDING, many)] == ["e0", "e1", "e2"][:MOST]


def test_a_known_crash_finds_its_entry() -> None:
    crash = msgspec.structs.replace(
        FINDING, recipe="torchao.mxfp8.rceil", rule="contract", arm="eager", role="backward",
        fingerprint="contract--backward--eager--refused only in backward (AssertionError in to_mx)"
        "--torchao.mxfp8",
    )  # fmt: skip
    assert nearest(crash, load_entries())[0].entry.id == "mx-shape-refusals"
