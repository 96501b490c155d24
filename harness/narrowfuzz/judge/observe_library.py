"""Runs a case of a library's own layers on its arms, and collects the evidence for its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from narrowfuzz.arms.library import run_library
from narrowfuzz.arms.library_ranks import run_on_ranks
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.features import features
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.recipe.stateful import Subject
from narrowfuzz.rules.evidence import Evidence, OwnLayers
from narrowfuzz.trace.trace import Trace

#: Of the cases with a focus, one in this number is run again with the state that others left.
_COMPANY_EVERY = 4
#: A training with such a forward is always run again: only the next model can meet the state that
#: it leaves behind.
_LEAVES = "forward dropped"


#: Runs a case on ranks.
OnRanks = Callable[[Case, Subject, Arm], Trace]


def traces_of(
    case: Case, subject: Subject, arms: Iterable[Arm], on_ranks: OnRanks
) -> dict[str, Trace]:
    """The case's traces, by arm; those of ranks are run by ``on_ranks``."""
    traces: dict[str, Trace] = {}
    for arm in arms:
        if arm.sharded:
            trace = on_ranks(case, subject, arm)
        else:
            trace = run_library(case, subject, arm.name, checkpointed=arm.recomputes)
        traces[arm.name] = trace
        if trace.error is not None:
            break  # other arms would fail in the same way
    return traces


def observe_library(
    case: Case,
    subject: Subject,
    arms: Iterable[Arm],
    deviations: Mapping[str, str],
    refusal: str,
    focus: int | None = None,
    on_ranks: OnRanks = run_on_ranks,
) -> Evidence:
    """The evidence of the case, run on these arms; with a ``focus`` mostly without running it again
    with the state that other models left. ``on_ranks`` runs an arm that consists of ranks."""
    case = _with(case, _event_by_event(case.spec))
    traces = traces_of(case, subject, arms, on_ranks)
    after_others: Callable[[], Trace] | None = None
    whole = [
        arm for arm, trace in traces.items() if trace.error is None and not BY_NAME[arm].sharded
    ]
    among = focus is None or focus % _COMPANY_EVERY == 0 or _LEAVES in features(case.spec)
    if whole and among:
        after_others = partial(
            run_library,
            case,
            subject,
            whole[-1],
            checkpointed=BY_NAME[whole[-1]].recomputes,
            reset=False,
        )
    own = OwnLayers(
        kind=subject.kind,
        policy=subject.policy,
        resizing=subject.resizing,
        gradient_rounding=subject.gradient_rounding,
        after_others=after_others,
        alone=lambda arm, rank: run_library(
            case, subject, arm, checkpointed=BY_NAME[arm].recomputes, rank=rank
        ),
        run=lambda other: run_library(_with(case, other), subject, "eager", checkpointed=False),
    )
    stopped = any(trace.error is not None for trace in traces.values())
    return Evidence(case, traces, deviations, refusal, stopped=stopped, library=own)


def _event_by_event(spec: Spec) -> Spec:
    """The Spec with its plain steps written as events, as rules name events by their positions."""
    return msgspec.structs.replace(
        spec, events=spec.training, steps=1, microbatches=1, grad_mode="train"
    )


def _with(case: Case, spec: Spec) -> Case:
    return msgspec.structs.replace(case, spec=spec)
