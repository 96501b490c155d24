"""The bug narrowfuzz was made for, planted: found where comparing gradients sees nothing.

Measured by ``make seed-bug`` in a process of its own: a planted compiler leaves artefacts behind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fresh import python
from narrowfuzz.arms.available import unavailable
from narrowfuzz.case.arm import INDUCTOR

pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.xdist_group("seed-bug"),
    pytest.mark.skipif(bool(unavailable(INDUCTOR)), reason=unavailable(INDUCTOR)),
]
ROOT = Path(__file__).resolve().parents[1]
#: Inductor, rung, gain of wq and wk.
Key = tuple[str, str, float]


@pytest.fixture(scope="module")
def rows() -> dict[Key, dict[str, Any]]:
    script = ROOT / "benchmarks" / "seed_bug.py"
    done = python(script, "--json", env={"PYTHONPATH": str(ROOT)}, seconds=900)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        ("planted" if r["planted"] else "shipped", r["rung"].split("+")[0], r["gain"]): r
        for r in found
    }


def test_recompute_and_statistics_find_it_at_ordinary_logits(rows: dict[Key, Any]) -> None:
    row = rows["planted", "inductor", 1.0]
    assert (row["o13"], row["o18"]) == ("diverged", "diverged")
    assert row["moved"] > 0.1
    assert row["excess"] > 5.0, "the rows' sums alone would have shown it"


def test_comparing_gradients_does_not_find_it_at_ordinary_logits(rows: dict[Key, Any]) -> None:
    row, clean = rows["planted", "inductor", 1.0], rows["shipped", "inductor", 1.0]
    assert row["o9"] == "ok" and row["rmse"]
    assert row["sqnr_db"] > 17.0, "torchao's own threshold"
    assert row["allclose"] == clean["allclose"]
    assert row["error_ratio"] < 1.5 * clean["error_ratio"]


def test_sharp_logits_make_it_a_wrong_gradient(rows: dict[Key, Any]) -> None:
    row, clean = rows["planted", "inductor", 8.0], rows["shipped", "inductor", 8.0]
    assert row["error_ratio"] > 5.0 * clean["error_ratio"]
    assert row["excess"] > 100.0 * rows["planted", "inductor", 1.0]["excess"]


@pytest.mark.parametrize("gain", [1.0, 8.0])
def test_emulated_casts_make_it_vanish(rows: dict[Key, Any], gain: float) -> None:
    row = rows["planted", "inductor_strict", gain]
    assert (row["o13"], row["o18"], row["moved"]) == ("ok", "ok", 0.0)


@pytest.mark.parametrize("gain", [1.0, 8.0])
def test_the_shipped_compiler_keeps_attention_clean(rows: dict[Key, Any], gain: float) -> None:
    row = rows["shipped", "inductor", gain]
    assert (row["o13"], row["o18"], row["moved"]) == ("ok", "ok", 0.0)
    assert row["excess"] < 1.0
