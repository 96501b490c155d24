"""What was verified on which versions: one record for each pair, the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import narrowfuzz.verified
import pytest
from narrowfuzz.verified import Verified, keep_verified, load_verified


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "verified.json"
    monkeypatch.setattr(narrowfuzz.verified, "verified_file", lambda: found)
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
    assert "0 of 1 ledger entries show (1 cannot be told here)" in told
    assert told.endswith("of an absent GPU: 8 passed, 0 failed")


def test_what_is_shipped_loads() -> None:
    assert load_verified()
