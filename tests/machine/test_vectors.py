"""A fresh folder of artefacts is told what is known of the processor, once all of it is known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from narrowfuzz.machine import isa as vectors


def test_nothing_is_told_before_all_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "fresh"
    monkeypatch.setattr(vectors, "_kept", lambda: kept)
    (kept / "ab").mkdir(parents=True)
    (kept / "ab" / "half.so").write_bytes(b"half")
    folder.mkdir()
    vectors.copy_cache_to(folder)
    assert not list(folder.iterdir())
    (kept / "asked").touch()
    vectors.copy_cache_to(folder)
    assert (folder / "ab" / "half.so").read_bytes() == b"half"


def test_what_is_asked_is_kept_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpu_vec_isa

    asked: list[str] = []

    def answer() -> list[str]:
        asked.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return []

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", answer)
    monkeypatch.setattr(vectors, "_kept", lambda: tmp_path / "kept")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    vectors.probe_and_cache()
    assert asked == [str(tmp_path / "kept")] and (tmp_path / "kept" / "asked").exists()
