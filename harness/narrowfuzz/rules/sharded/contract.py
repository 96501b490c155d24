"""The contract of a sharded case: what runs in one process runs on ranks."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.rules.sharded.evidence import arm_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Refuses, Runs
from narrowfuzz.trace.trace import RunError
from narrowfuzz.trace.verdict import Verdict

#: The symptom of a model that one process refuses and ranks do not.
TAKEN = "runs on ranks where one process raises"


def check_contract(evidence: Evidence) -> Iterator[Verdict]:
    """A model that converts and trains in one process does so on ranks, unless the recipe refuses
    the shape of a piece. A model that one process must refuse, and does, ranks must refuse, too."""
    if evidence.forbidden and evidence.traces[EAGER.name].error is not None:
        yield from _refused(evidence)
        return
    if not evidence.ran:
        error = evidence.traces[EAGER.name].error
        why = "one process refuses it" + (f": {error.type}: {_first_line(error)}" if error else "")
        yield plain("contract", arm_of(evidence), "output", "not_applicable", why)
        return
    for arm in evidence.traces:
        if arm != EAGER.name:
            yield from _of_arm(evidence, arm)


def _first_line(error: RunError) -> str:
    return (error.message.strip().splitlines() or ["(no message)"])[0][:200]


def _refused(evidence: Evidence) -> Iterator[Verdict]:
    for arm, trace in evidence.on_ranks.items():
        if trace.error is None:
            at, expect = At(what="error", phase="forward"), Refuses(evidence.forbidden)
            yield diverged("contract", arm, "forward", TAKEN, at, "a result", expect)
        elif trace.error.phase == "forward":
            yield plain("contract", arm, "forward", "ok")
        else:
            yield from _of_arm(evidence, arm)


def _of_arm(evidence: Evidence, arm: str) -> Iterator[Verdict]:
    error = evidence.traces[arm].error
    if error is None:
        yield plain("contract", arm, "output", "ok")
    elif evidence.refusal:
        yield plain("contract", arm, error.phase, "not_applicable", evidence.refusal)
    else:
        compiled = ", compiled" if BY_NAME[arm].compiled else ""
        raised = f"{error.type} in {error.where.rsplit('.', 1)[-1]}"
        yield Verdict(
            "contract",
            arm,
            error.phase,
            "crashed",
            f"fails only on ranks{compiled} ({raised})",
            At(what="error", phase=error.phase, name=error.where, rank=max(error.rank, 0)),
            f"{error.type}: {_first_line(error)}",
            Runs(error.type),
        )
