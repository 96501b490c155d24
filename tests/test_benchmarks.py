"""What the benchmarks measure is the campaign's own worker."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from narrowfuzz.campaign.slices import Slice

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))


def test_a_quiet_worker_counts_each_case_once(tmp_path: Path) -> None:
    from plain_hypothesis import quiet_worker

    told: list[int] = []
    worker = quiet_worker(tmp_path, ("eager",), told.append)
    start = time.monotonic()
    worker.serve(Slice("none", 2.0, "linears"), start + 2.0)
    assert worker.ran > 0 and told[-1] == worker.ran
    assert worker.ran <= worker.judged == len(told)
    assert worker.keys and len(worker.keys) == len(worker.firsts)
