"""O1 self-repeat: the same arm on the same case twice is the same."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.oracles.evidence import Evidence
from narrowfuzz.oracles.oracle import plain
from narrowfuzz.oracles.whole import equal_outputs
from narrowfuzz.verdict import Verdict


def check_repeat(evidence: Evidence) -> Iterator[Verdict]:
    """O1: the same arm on the same case, tapped and untapped, leaves equal bits."""
    for arm, trace in evidence.traces.items():
        again = evidence.repeats.get(arm)
        if again is None or trace.error is not None:
            yield plain("O1", arm, "output", "not_applicable")
        elif again.error is not None:
            yield Verdict(
                "O1", arm, "output", "diverged", "raises the second time",
                measured=f"{again.error.type}: {again.error.message[:200]}", allowed="a result",
            )  # fmt: skip
        else:
            yield equal_outputs("O1", evidence, trace, again, "differs on repeat")
