"""What was verified on which versions: one record for each pair, the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import narrowfuzz.ledger.verified
import pytest
from narrowfuzz.ledger.ledger import Entry, Installed, Standing, load_entries, stands
from narrowfuzz.ledger.verified import Verified, keep_verified, load_verified


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "verified.json"
    monkeypatch.setattr(narrowfuzz.ledger.verified, "verified_file", lambda: found)
    return found


def record(torch: str, **changes: Any) -> Verified:
    fields: dict[str, Any] = {
        "date": "2026-11-22", "python": "3.11.7", "torchao": "0.18.0", "kernels": {},
        "entries": {"a": "shows", "b": "gone", "c": "absent"}, "baseline_cases": 7,
        "baseline_findings": (), "properties_passed": 40, "properties_failed": 0,
    }  # fmt: skip
    return Verified(torch=torch, **fields | changes)


def test_versions_keep_a_record_each(file: Path) -> None:
    assert load_verified() == []
    for torch in ("2.15.0", "2.11.0"):
        keep_verified(record(torch))
    assert [kept.torch for kept in load_verified()] == ["2.11.0", "2.15.0"]


def test_a_newer_record_takes_the_place_of_its_versions(file: Path) -> None:
    keep_verified(record("2.11.0"))
    keep_verified(record("2.13.0"))
    again = record("2.11.0", date="2026-12-01")
    keep_verified(again)
    assert load_verified() == [again, record("2.13.0")]


def test_a_file_that_is_no_list_of_records_is_refused_by_name(file: Path) -> None:
    file.write_text("[{}]")
    with pytest.raises(ValueError, match=r"verified\.json"):
        load_verified()


def test_the_sentence_counts_what_was_tried() -> None:
    plain = record("2.11.0").sentence()
    assert "1 of 2 ledger entries show; baselines: 0 findings in 7 cases" in plain
    assert "absent GPU" not in plain
    told = record("2.11.0", entries={"a": "cannot tell"}, gpu_passed=8).sentence()
    assert "0 of 1 ledger entries show (1 cannot be checked here)" in told
    assert told.endswith("tests about an absent GPU: 8 passed, 0 failed")


def test_what_is_shipped_loads() -> None:
    assert load_verified()


def standing(entry: Entry, torch: str, torchao: str) -> Standing:
    """How an entry stands to these releases, on a device that it names."""
    there = {"torch": Installed(torch, True), "torchao": Installed(torchao, True)}
    return stands(entry, entry.devices[0], there.get)


def contradictions(entry: Entry, records: list[Verified]) -> list[str]:
    """What an entry says of a release that was tried, and the record says otherwise."""
    wanted = {"shows": "named", "gone": "absent", "absent": "absent"}
    told = [(r, r.entries.get(entry.id, "")) for r in records]
    return [
        f"torch {r.torch}: {how}"
        for r, how in told
        if how in wanted and standing(entry, r.torch, r.torchao) != wanted[how]
    ]


#: Of an emulation: on which release it is emulated is not on record.
ON_RECORD = [e for e in load_entries() if e.versions.keys() <= {"torch", "torchao"}]


@pytest.mark.parametrize("entry", ON_RECORD, ids=lambda entry: entry.id)
def test_an_entry_says_of_each_release_what_its_record_says(entry: Entry) -> None:
    assert contradictions(entry, load_verified()) == []


@pytest.mark.parametrize("entry", ON_RECORD, ids=lambda entry: entry.id)
def test_no_entry_names_a_release_of_torch_that_nobody_tried(entry: Entry) -> None:
    tried = {r.torch.rsplit(".", 1)[0] for r in load_verified()}
    others = {f"2.{minor}" for minor in range(30)} - tried
    assert not [v for v in sorted(others) if standing(entry, f"{v}.0", "0.18.0") == "named"]


def test_a_range_that_ends_too_early_or_late_contradicts_its_record() -> None:
    entry = next(e for e in ON_RECORD if e.id == "mx-noncontiguous-input")
    said = {"2.11.0": "shows", "2.13.0": "cannot tell", "2.15.0": "gone"}
    records = [record(torch, entries={entry.id: how}) for torch, how in said.items()]
    ranges = {
        (">=2.11,<2.12", ">=2.15"): [],
        (">=2.13,<2.14", ">=2.15"): ["torch 2.11.0: shows"],
        (">=2.11", ""): ["torch 2.15.0: gone"],
        (">=2.11,<2.12", ""): ["torch 2.15.0: gone"],  # not named, but not ruled out
    }
    for (named, absent), wanted in ranges.items():
        absent_in = {"torch": absent} if absent else {}
        changed = msgspec.structs.replace(entry, versions={"torch": named}, absent_in=absent_in)
        assert contradictions(changed, records) == wanted
