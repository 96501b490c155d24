"""The folder of a run: findings come back whole, and sightings, claims and severities are kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec, load_case
from narrowfuzz.report.store import Store, claim, release
from narrowfuzz.triage.finding import Finding

pytestmark = pytest.mark.xdist_group("campaign")


def finding(severity: str = "high", seed: int = 0, **changes: object) -> Finding:
    case = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec(seed=seed))
    words = dict.fromkeys(("recipe", "rule", "arm", "role", "symptom", "sentence"), "x")
    fields = {
        "id": case.id, "fingerprint": f"f{seed}", "severity": severity, "strength": "exact",
        "reach": "gaussian", "case": case, "minimal": case, "flake": "always",
    }  # fmt: skip
    return msgspec.structs.replace(Finding(**words, **fields), **changes)  # type: ignore[arg-type]


def suspected(**changes: object) -> Finding:
    """One that no script shows."""
    return finding(why_suspected="its script passes", **changes)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "out")


class TestStore:
    def test_findings_come_back_most_severe_first(self, store: Store) -> None:
        for severity in ("low", "high", "medium"):
            store.add(finding(severity, seed=len(severity)), "print()")
        store.add(suspected(seed=99), "print()")
        assert [f.severity for f in store.findings()] == ["high", "medium", "low"]
        assert len(store.findings("suspected")) == 1

    def test_a_finding_comes_back_whole(self, store: Store) -> None:
        kept = finding("high")
        assert store.add(kept, "print('x')") == "new"
        assert store.findings() == [kept]
        folder = store.out / "findings" / kept.id
        assert load_case((folder / "case.json").read_bytes()) == kept.minimal
        assert (folder / "repro.py").read_text() == "print('x')"
        assert Store(store.out).findings() == [kept]

    def test_a_fingerprint_is_claimed_once(self, store: Store) -> None:
        assert claim(store.out, "O5--output--eager--a/b c--torch")
        assert not claim(store.out, "O5--output--eager--a/b c--torch")
        assert claim(store.out, "O6--output--eager--a/b c--torch")

    def test_what_one_case_does_not_show_another_may_three_in_all(self, store: Store) -> None:
        name = "O5--output--eager--value--torch"
        for _ in range(3):
            assert claim(store.out, name)
            release(store.out, name)
        assert not claim(store.out, name)

    def test_three_of_a_dtype_close_it_for_that_and_six_for_all(self, store: Store) -> None:
        name = "O5--output--eager--value--torch"
        for dtype in ("bf16", "fp32"):
            for _ in range(3):
                assert claim(store.out, name, dtype) and not claim(store.out, name, "fp16")
                release(store.out, name, dtype)
            assert not claim(store.out, name, dtype)
        assert not claim(store.out, name, "fp16")

    def test_what_no_script_shows_is_kept_as_suspected_with_the_reason(self, store: Store) -> None:
        kept = suspected()
        assert store.add(kept, "") == "suspected"
        assert store.findings() == [] and store.suspected() == [kept]
        folder = store.out / "findings" / kept.id
        assert load_case((folder / "case.json").read_bytes()) == kept.minimal

    def test_what_one_case_did_not_show_becomes_a_sighting_of_one_that_does(
        self, store: Store
    ) -> None:
        first = suspected()
        second = finding(seed=1, fingerprint=first.fingerprint)
        store.add(first, "")
        assert store.add(second, "") == "new"
        assert store.suspected() == [] and store.findings() == [second]
        assert store.sightings(second.id) == [first]

    def test_findings_whose_minimal_cases_need_the_same_are_one(self, store: Store) -> None:
        first, second = (finding(seed=i, needs=["switch"]) for i in range(2))
        other = finding(seed=2, needs=["reload"])
        assert [store.add(f, "") for f in (first, second, other)] == ["new", "sighting", "new"]
        assert store.sightings(first.id) == [second] and store.sightings(other.id) == []

    def test_what_needs_more_to_break_the_same_rule_is_the_same(self, store: Store) -> None:
        more = finding("high", 0, needs=["reentrant", "switch"], rule="O14")
        least = finding("medium", 1, needs=["reentrant"], rule="O14")
        other = finding("low", 2, needs=["reentrant", "reload"], rule="O13")
        assert [store.add(f, "") for f in (more, least, other)] == ["new", "new", "new"]
        kept = store.findings()
        assert [f.id for f in kept] == [least.id, other.id]
        assert kept[0].severity == "high"  # as its severest sighting
        assert [f.id for f in store.sightings(least.id)] == [more.id]

    def test_another_known_issue_is_another_cause_and_keeps_its_severity(
        self, store: Store
    ) -> None:
        known, worse, new, unasked = (
            finding(how, i, needs=["switch"], known_issue=issue)
            for i, (how, issue) in enumerate(
                [("low", "one"), ("medium", "two"), ("medium", ""), ("high", None)]
            )
        )
        assert [store.add(f, "") for f in (known, worse, new)] == ["new", "new", "new"]
        assert store.add(unasked, "") == "sighting"
        how = {f.id: f.severity for f in store.findings()}
        assert how[known.id] == "low" and how[worse.id] == "medium"
        again = finding("high", 9, needs=["switch"], known_issue="")
        assert store.add(again, "") == "sighting"
        assert {f.id: f.severity for f in store.findings()}[known.id] == "low"

    def test_what_needs_nothing_is_never_taken_for_the_same(self, store: Store) -> None:
        assert [store.add(finding(seed=i), "") for i in range(2)] == ["new", "new"]

    def test_a_smaller_case_takes_the_place_of_a_larger(self, store: Store) -> None:
        missed = suspected(seed=0, fingerprint="one")
        large, small = (finding(seed=i, fingerprint="one") for i in (1, 2))
        store.add(missed, "")
        store.add(large, "large")
        assert store.replace(large.id, small, "small") == "new"
        assert store.findings() == [small]
        assert [f.id for f in store.sightings(small.id)] == [missed.id]
        assert not (store.out / "findings" / large.id).exists()

    def test_what_stays_as_it_is_stays(self, store: Store) -> None:
        kept = finding("high")
        store.add(kept, "a script")
        assert store.replace(kept.id, kept, "a script") == "new"
        assert store.findings() == [kept]

    def test_a_smaller_case_may_need_what_another_needs(self, store: Store) -> None:
        first, large, small = (
            finding(seed=i, needs=needs) for i, needs in enumerate([["switch"], [], ["switch"]])
        )
        assert [store.add(f, "") for f in (first, large)] == ["new", "new"]
        assert store.replace(large.id, small, "") == "sighting"
        assert store.findings() == [first]
        assert store.sightings(first.id) == [small]

    @pytest.mark.parametrize("tail", ["x", "y" * 300, "(RuntimeError in <lambda>)", "ü:*?"])
    def test_any_fingerprint_can_be_claimed(self, store: Store, tail: str) -> None:
        assert claim(store.out, f"contract--forward--eager--{tail}")
        assert not claim(store.out, f"contract--forward--eager--{tail}")

    def test_long_fingerprints_are_told_apart(self, store: Store) -> None:
        assert claim(store.out, "x" * 250 + "1")
        assert claim(store.out, "x" * 250 + "2")
