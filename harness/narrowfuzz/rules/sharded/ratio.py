"""O9 on ranks whose results are put together from parts, such as attention over split sequences."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.case.arm import EAGER
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import plain
from narrowfuzz.rules.sharded.evidence import run_of
from narrowfuzz.rules.whole import error_ratio
from narrowfuzz.trace.verdict import Verdict


def check_put_together(evidence: Evidence) -> Iterator[Verdict]:
    """O9: the error against float64 of results that ranks put together is at most a small multiple
    of one process's error: softmaxes over parts of the keys are merged, and sums split over ranks.
    By S4 all ranks hold the same, so only the first is judged."""
    run = run_of(evidence)
    if run is None:
        return
    if evidence.spec.sharding.ranks == 1:
        yield plain("O9", run.arm, "output", "not_applicable", "one rank leaves the bits (S1)")
        return
    (single,) = evidence.traces[EAGER.name].ranks
    yield error_ratio(evidence, run.arm, run.ranks[0], single)
