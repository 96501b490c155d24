"""Run a stateful case on its arms and apply every rule of schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from narrowfuzz.arm import BY_NAME, climb
from narrowfuzz.arms.stateful import run_schedule
from narrowfuzz.case import Case
from narrowfuzz.oracles.schedule import SCHEDULE_ORACLES
from narrowfuzz.oracles.schedule_evidence import ScheduleEvidence
from narrowfuzz.schedule.events import Schedule
from narrowfuzz.schedule.story import FEATURES, story
from narrowfuzz.schedule.trace import StateTrace
from narrowfuzz.stateful import Stateful, Subject
from narrowfuzz.verdict import Verdict

#: Of cases with a focus one in so many is run again among the remains of the others.
_COMPANY_EVERY = 4
#: A schedule with such a forward always is: only the next model can meet what it leaves behind.
_LEAVES = FEATURES["forward dropped"]


def run_arms(case: Case, subject: Subject, only: frozenset[str] | None) -> dict[str, StateTrace]:
    """The case's traces, by arm."""
    schedule = case.spec.schedule
    assert schedule is not None
    traces: dict[str, StateTrace] = {}
    for arm in climb(case.spec):
        if only is not None and arm.name not in only:
            continue
        trace = run_schedule(case, subject, arm.name, checkpointed=arm.recomputes)
        traces[arm.name] = trace
        if trace.error is not None:
            break  # dearer arms would only say the same
    return traces


def judge_schedule(
    case: Case,
    recipe: Stateful,
    subject: Subject,
    deviations: Mapping[str, str],
    rules: Sequence[str],
    only: frozenset[str] | None = None,
    focus: int | None = None,
) -> tuple[list[Verdict], bool]:
    """All verdicts of these rules, and whether every run came to its end."""
    evidence = observe(case, recipe, subject, deviations, only, focus)
    ran = all(trace.error is None for trace in evidence.traces.values())
    return list(_verdicts(evidence, rules)), ran


def observe(
    case: Case,
    recipe: Stateful,
    subject: Subject,
    deviations: Mapping[str, str],
    only: frozenset[str] | None = None,
    focus: int | None = None,
) -> ScheduleEvidence:
    """What the rules judge: the case, run on its arms; with a ``focus`` mostly without running it
    again among the remains of other models."""
    schedule = case.spec.schedule
    assert schedule is not None
    traces = run_arms(case, subject, only)
    company: Callable[[], StateTrace] | None = None
    whole = [arm for arm, trace in traces.items() if trace.error is None]
    among = focus is None or focus % _COMPANY_EVERY == 0 or _LEAVES(story(schedule))
    if whole and among:
        company = partial(
            run_schedule,
            case,
            subject,
            whole[-1],
            checkpointed=BY_NAME[whole[-1]].recomputes,
            reset=False,
        )
    return ScheduleEvidence(
        case=case,
        schedule=schedule,
        kind=subject.kind,
        policy=subject.policy,
        traces=traces,
        deviations=deviations,
        refusal=recipe.refusal(case.spec),
        company=company,
        run=lambda other: run_schedule(_with(case, other), subject, "eager", checkpointed=False),
    )


def _verdicts(evidence: ScheduleEvidence, rules: Sequence[str]) -> Iterator[Verdict]:
    for oracle in SCHEDULE_ORACLES:
        if oracle.name in rules:
            yield from oracle.check(evidence)  # type: ignore[arg-type]


def _with(case: Case, schedule: Schedule) -> Case:
    spec = msgspec.structs.replace(case.spec, schedule=schedule)
    return msgspec.structs.replace(case, spec=spec)
