"""S11: a training that is saved on one layout and loaded on another continues unchanged."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import plain
from narrowfuzz.rules.sharded.evidence import arm_of, run_of
from narrowfuzz.rules.sharded.results import differs
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Verdict

#: The parts of a training that are compared with each other, and the symptom if they differ.
_PAIRS = (
    ("loaded", "saved", "is not what was saved"),
    ("resumed", "afresh", "differs from what the same state gives"),
)


def check_resumed(evidence: Evidence) -> Iterator[Verdict]:
    """S11: parameters and the optimizer's moments, put together, are those that were saved; and
    from there on every rank gives the bits of a model into which they were written by hand."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    if not evidence.spec.sharding.resumes:
        yield plain("S11", arm, "state", "not_applicable", "nothing is saved")
        return
    there = evidence.spec.sharding.resumed.ranks or len(run.ranks)
    for got, want, symptom in _PAIRS:
        found = (
            differs(
                "S11",
                arm,
                symptom,
                At(name=name, rank=rank),
                x,
                trace,
                rank,
                name.replace(want, got, 1),
            )
            for rank, trace in enumerate(run.ranks[:there])
            for name, x in trace.outputs.items()
            if name.startswith(f"{want}:")
        )
        causes = {verdict.role: verdict for verdict in reversed(list(filter(None, found)))}
        yield from causes.values() or [plain("S11", arm, "state", "ok")]
        if causes:
            return
