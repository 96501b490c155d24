"""Runs a library's layers on ranks. The ranks are processes, because threads would share the state
that the library keeps per process.

Each rank trains a model of its own on rows of its own. Gradients are not reduced: the ranks share
only what the library itself shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from narrowfuzz.arms.library import run_library
from narrowfuzz.arms.processes import TRANSPORT, in_processes
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.spec import Case
from narrowfuzz.play.ranks import Disagree
from narrowfuzz.recipe.stateful import Subject
from narrowfuzz.trace.trace import RunError, Trace


def run_on_ranks(
    case: Case,
    subject: Subject,
    arm: Arm,
    prepare: Callable[[], None] = lambda: None,
    device: str = "cpu",
) -> Trace:
    """A trace whose ``ranks`` are the traces of the ranks; if a rank fails, it has that rank's
    error. ``prepare`` runs first in every process."""
    ranks = case.spec.sharding.ranks
    results, where = in_processes(
        ranks,
        partial(_on_rank, case=case, subject=subject, arm=arm, prepare=prepare),
        device,
    )
    failed = [trace for trace in results.values() if trace.error is not None]
    for trace in failed:
        assert trace.error is not None
        if TRANSPORT not in trace.error.message:  # else it only lost contact with a failed rank
            return Trace(arm.name, error=trace.error)
    if len(results) == ranks and not failed:
        return Trace(arm.name, ranks=tuple(results[rank] for rank in range(ranks)))
    event = min((trace.error.event for trace in failed if trace.error is not None), default=-1)
    here = f"{__name__}.{run_on_ranks.__name__}"
    return Trace(arm.name, error=RunError("forward", Disagree.__name__, where, here, event))


def _on_rank(
    on: Callable[..., list[Any]],
    case: Case,
    subject: Subject,
    arm: Arm,
    prepare: Callable[[], None],
) -> Trace:
    """This rank's trace."""
    prepare()
    own: list[Trace] = []

    def main(rank: int, mesh: Any) -> None:
        trace = run_library(case, subject, arm.name, checkpointed=arm.recomputes, rank=rank)
        if trace.error is not None:
            trace = replace(trace, error=replace(trace.error, rank=rank))
        own.append(trace)

    on({"data": case.spec.sharding.data}, main)
    return own[0]
