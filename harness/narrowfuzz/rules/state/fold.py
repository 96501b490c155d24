"""What every event must leave behind: a state and an event make the next state.

The fold is driven by the schedule and by the true maxima of the tensors that were really quantised,
so no number of the library enters what is expected of it. After each event it goes on from what was
observed: the next cause is seen, too.

Book-keeping (``_noted``) is the library's own and is done once. What the event then owes to every
slot (``_planned``) is asked with the deviations that the ledger has and by the rule; where the two
differ, once more without each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from narrowfuzz.case.events import Backward, Close, Event, Forward, Open, Reload, Settings, Step
from narrowfuzz.numerics.delayed import Slot
from narrowfuzz.rules.library.evidence import Progress
from narrowfuzz.rules.state.difference import followed
from narrowfuzz.rules.state.library import Library
from narrowfuzz.rules.state.outcome import Outcome, outcome
from narrowfuzz.rules.state.plan import Commit, Move, Numbered, Plan, commit, lose, quantise
from narrowfuzz.rules.state.recompute import Checkpoints, Recomputed, modules, recomputed
from narrowfuzz.rules.state.run import Deviations, Now, Run
from narrowfuzz.trace.snapshots import Moment, SlotName
from narrowfuzz.trace.trace import Phase


@dataclass(frozen=True)
class State:
    """Expected scales and windows between two events, and what an update depends on."""

    slots: Mapping[SlotName, Slot] = field(default_factory=dict)
    #: Quantised by some forward so far: all others' scales are not the schedule's doing.
    ran: frozenset[SlotName] = frozenset()
    #: Staged since their last commit, and under which settings.
    waiting: Mapping[SlotName, Settings] = field(default_factory=dict)
    library: Library = field(default_factory=Library)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


@dataclass(frozen=True)
class Turn:
    """One event: the states around it, and what it did."""

    number: int
    event: Event
    seen: Moment
    before: State
    after: State
    #: Of the slots that owed something to it.
    outcomes: Mapping[SlotName, Outcome]
    #: Deviations that made a difference, and which: the event, and what of it.
    followed: Mapping[str, frozenset[str]]


def expected(
    run: Run,
    events: Iterable[tuple[int, Event, Progress]],
    seen: Iterable[Moment],
    deviations: Deviations,
) -> Iterator[Turn]:
    """Every event of a run with the states around it, as long as something was seen of it."""
    state = State()
    for (number, event, progress), moment in zip(events, seen, strict=False):
        now = Now(run, event, progress, moment, deviations)
        noted, again = _noted(state, now)
        under = partial(_planned, noted, again, now)
        plan = under(deviations)
        outcomes = {n: outcome(noted.slots.get(n), moves) for n, moves in plan.moves.items()}
        whose = followed(number, plan, under, deviations)
        after = _settled(plan, outcomes, noted.checkpoints)
        yield Turn(number, event, moment, state, after, outcomes, whose)
        state = replace(after, slots={**after.slots, **moment.state})


def _settled(plan: Plan, outcomes: Mapping[SlotName, Outcome], checkpoints: Checkpoints) -> State:
    """The state that a plan leads to."""
    written = {name for name, after in outcomes.items() if any(map(_written, after.done))}
    waiting = {name: under for name, under in plan.waiting.items() if name not in written}
    slots = {**plan.slots, **{name: after.slot for name, after in outcomes.items()}}
    return State(slots, plan.ran, waiting, plan.library, checkpoints)


def _written(move: Move) -> bool:
    """Was this an update because it was observed?"""
    return isinstance(move, Commit) and move.only is not None


def _noted(state: State, now: Now) -> tuple[State, Recomputed]:
    """What the library writes down about this event, and what its recomputes update."""
    run, event, progress = now.run, now.event, now.progress
    library, checkpoints, again = recomputed(state.library, state.checkpoints, now)
    match event:
        case Open(enabled=enabled):
            library = library.entered(progress.settings if enabled else None)
        case Close():
            library = library.left()
        case Forward(inside=inside, mode=mode):
            inner = progress.inner(event)
            if inside:
                library = library.entered(inner)
            if inner is not None and mode == "train" and not (run.by_library and run.graphless):
                library = library.trained(progress.forwards)
            if inside:
                library = library.left()
            for call in now.seen.calls:
                library = library.called(call.layer, inner)
        case Reload():
            library = replace(library, registered={})
    return replace(state, library=library, checkpoints=checkpoints), again


def _planned(state: State, again: Recomputed, now: Now, deviations: Deviations) -> Plan:
    """What the event stages and updates under these deviations."""
    now, run, event, progress = (
        replace(now, deviations=deviations),
        now.run,
        now.event,
        now.progress,
    )
    plan = Plan(state.slots, state.ran, state.waiting, state.library, {})
    match event:
        case Reload():
            return lose(plan, deviations)
        case Close() if len(progress.open) == 1:
            keeps = progress.open[0] is None and "disabled_region_keeps" in deviations
            return plan if keeps else commit(plan, "forward", now)
        case Forward():
            return _forward(plan, event, now)
        case Backward():
            return _backward(plan, event, again, state.checkpoints.inside, now)
        case Step() if run.quantized_init and "writing_parameters_updates_forward" in deviations:
            # they are written one by one, and the last may update: which is the last depends on
            # models long gone, so what was observed decides, layer by layer
            return commit(plan, "forward", now, now.seen.state)
    return plan


def _forward(plan: Plan, event: Forward, now: Now) -> Plan:
    """Stage what a forward quantised. One that is an outermost region updates where it is left; in
    a checkpoint of each layer every call is one."""
    run, progress, deviations = now.run, now.progress, now.deviations
    trains, settings = event.mode == "train", progress.inner(event)
    own = event.inside and trains and not progress.open  # in no_grad, it is left without an update
    keeps = run.graphless and "checkpointed_region_keeps" in deviations
    casts = _casts(now.seen, "forward")
    policy = None if settings is None else run.policy(settings)
    if settings is not None and policy is not None and casts:
        stages = trains or "evaluation_stages" in deviations
        calls = groupby(casts, lambda one: one[1].at.call) if own and run.each else [(0, casts)]
        for i, (_, some) in enumerate(calls):
            if i > 0 and not keeps:
                plan = commit(plan, "forward", now)
            plan = quantise(plan, some, settings, policy, now, stages=stages)
    return commit(plan, "forward", now) if own and not keeps else plan


def _backward(
    plan: Plan, event: Backward, again: Recomputed, inside: frozenset[int], now: Now
) -> Plan:
    """Stage the gradients that a backward quantised, and update what it owes an update."""
    run, deviations = now.run, now.deviations
    segments = again.segments and "segments_update_gradients" in deviations
    settings = _settings_of(event, now.progress)
    policy = None if settings is None else run.policy(settings)
    if settings is not None and policy is not None:
        for i, some in enumerate(modules(run, _casts(now.seen, "backward"))):
            if i > 0 and segments and again.own:
                plan = commit(plan, "backward", now)
            plan = quantise(plan, some, settings, policy, now, stages=True)
    if again.own if segments else _updates_gradients(plan.library, event, inside, now):
        plan = commit(plan, "backward", now)
    for deviation, times in again.forward.items():
        for _ in range(times if deviation in deviations else 0):
            plan = commit(plan, "forward", now)
    return plan


def _casts(seen: Moment, phase: Phase) -> list[Numbered]:
    """What was quantised into slots; what a recompute casts is not staged."""
    casts = enumerate(seen.casts)
    return [(n, cast) for n, cast in casts if cast.slot is not None and cast.at.phase == phase]


def _settings_of(event: Backward, progress: Progress) -> Settings | None:
    """What the forwards of a backward ran under; the first's, where they differ."""
    ran = [progress.ran[f][0] for f in event.of if f in progress.ran]
    return ran[0] if ran else None


def _updates_gradients(library: Library, event: Backward, inside: frozenset[int], now: Now) -> bool:
    run, progress, deviations = now.run, now.progress, now.deviations
    ran = [progress.ran[f] for f in event.of if f in progress.ran]
    policies = [(run.policy(settings), region) for settings, region in ran]
    owed = any(
        policy is not None and (policy.backward_commits == "each" or region.first in event.of)
        for policy, region in policies
    )
    if run.graphless:
        return owed  # what each segment's recompute is told is another matter
    # the first layer is told to, unless each layer has a region of its own
    each = run.each and bool(inside & set(event.of))
    if run.layout == "dangling" and not each and "first_layer_owns_update" in deviations:
        return False
    return library.updates(event.of, owed, deviations)
