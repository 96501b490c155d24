"""O1 self-repeat: two runs of the same arm on the same case give the same bits, whatever memory
held before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.rules.whole import equal_outputs
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Runs
from narrowfuzz.trace.meaning import shortened
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

#: The symptom of a result that depends on uninitialised memory.
UNWRITTEN = "depends on memory that nobody wrote"
#: The name of the other run in addresses.
AGAIN = "the second run"


def check_repeat(evidence: Evidence) -> Iterator[Verdict]:
    """O1: the same arm on the same case gives the same bits twice: in a tapped run, and in an
    untapped one whose uninitialised memory is filled with NaN."""
    for arm, trace in evidence.traces.items():
        again = evidence.repeats.get(arm)
        if again is None or trace.error is not None:
            yield plain("O1", arm, "output", "not_applicable")
        elif again.error is not None:
            error = again.error
            at = At(what="error", run=AGAIN, phase=error.phase)
            actual, expect = f"{error.type}: {shortened(error.message, 200)}", Runs(error.type)
            yield diverged("O1", arm, "output", "raises the second time", at, actual, expect)
        else:
            verdict = equal_outputs("O1", evidence, trace, again, "differs on repeat", AGAIN)
            yield (
                replace(verdict, symptom=UNWRITTEN)
                if _unwritten(verdict, trace, again)
                else verdict
            )


def _unwritten(verdict: Verdict, trace: Trace, again: Trace) -> bool:
    """True if the second run, whose memory was filled with NaN, has NaN where the first has a
    number."""
    at = verdict.at
    if verdict.status != "diverged" or not at.index:
        return False
    got, want = (run.outputs[at.name][at.index] for run in (trace, again))
    return bool(np.isnan(want) and not np.isnan(got))
