"""The contract of a sharded case: what runs in one process runs on ranks."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.rules.contract import allowed
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.rule import plain
from narrowfuzz.rules.sharded.evidence import arm_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Runs
from narrowfuzz.trace.verdict import Verdict


def check_contract(evidence: Evidence) -> Iterator[Verdict]:
    """A model that converts and trains in one process does so on ranks, unless the recipe says that
    a piece of it has no shape that it takes. What one process must not take, no ranks take."""
    if evidence.forbidden:
        for arm, trace in evidence.on_ranks.items():
            ran = trace.error is None
            yield allowed(evidence, arm) if ran else plain("contract", arm, "forward", "ok")
        return
    if not evidence.ran:
        why = "one process refuses it"
        yield plain("contract", arm_of(evidence), "output", "not_applicable", why)
        return
    for arm in evidence.traces:
        if arm != EAGER.name:
            yield from _of_arm(evidence, arm)


def _of_arm(evidence: Evidence, arm: str) -> Iterator[Verdict]:
    error = evidence.traces[arm].error
    if error is None:
        yield plain("contract", arm, "output", "ok")
    elif evidence.refusal:
        yield plain("contract", arm, error.phase, "not_applicable", evidence.refusal)
    else:
        lines = error.message.strip().splitlines() or ["(no message)"]
        compiled = ", compiled" if BY_NAME[arm].compiled else ""
        raised = f"{error.type} in {error.where.rsplit('.', 1)[-1]}"
        yield Verdict(
            "contract",
            arm,
            error.phase,
            "crashed",
            f"fails only on ranks{compiled} ({raised})",
            At(what="error", phase=error.phase, name=error.where, rank=max(error.rank, 0)),
            f"{error.type}: {lines[0][:200]}",
            Runs(error.type),
        )
