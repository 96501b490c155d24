"""The state that is expected after every event, computed from the state before it.

The fold is driven by the schedule and by the true maxima of the tensors that were really quantised,
so no number of the library enters the expectation. After each event it continues from the observed
state, so that the next cause is found, too.

Book-keeping (``_noted``) is the library's own and is done once. The moves of the event on every
slot (``_planned``) are planned under the ledger's deviations and by the rule alone; if the two
differ, once more without each of the deviations (``difference.py``).
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
    """Expected scales and windows between two events, and everything that an update depends on."""

    slots: Mapping[SlotName, Slot] = field(default_factory=dict)
    #: Slots with which the schedule has quantised so far: it did not set the scales of others.
    ran: frozenset[SlotName] = frozenset()
    #: Slot with a maximum staged since its last commit -> the settings that it was staged under.
    waiting: Mapping[SlotName, Settings] = field(default_factory=dict)
    library: Library = field(default_factory=Library)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


@dataclass(frozen=True)
class Turn:
    """One event: the states before and after it, and its effects."""

    number: int
    event: Event
    seen: Moment
    before: State
    after: State
    #: The outcomes of the slots on which the event has moves.
    outcomes: Mapping[SlotName, Outcome]
    #: Deviation that made a difference -> the differences, in words (``difference.followed``).
    followed: Mapping[str, frozenset[str]]


def expected(
    run: Run,
    events: Iterable[tuple[int, Event, Progress]],
    seen: Iterable[Moment],
    deviations: Deviations,
) -> Iterator[Turn]:
    """Every event of a run with the states before and after it, up to the last observed event."""
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
    """Was this an update that counts only because its result was observed?"""
    return isinstance(move, Commit) and move.only is not None


def _noted(state: State, now: Now) -> tuple[State, Recomputed]:
    """The state with the library's book-keeping of this event, and the updates by recomputes."""
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
    """The plan of what the event stages and updates under these deviations."""
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
            # parameters are written one by one, and the last write may update: which one is last
            # depends on models that no longer exist, so the observed state decides, layer by layer
            return commit(plan, "forward", now, now.seen.state)
    return plan


def _forward(plan: Plan, event: Forward, now: Now) -> Plan:
    """Stage what a forward quantised. If the forward is an outermost region, leaving it updates; if
    each layer is checkpointed, every layer call is such a region."""
    run, progress, deviations = now.run, now.progress, now.deviations
    trains, settings = event.mode == "train", progress.inner(event)
    own = event.inside and trains and not progress.open  # without a graph, leaving does not update
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
    """Stage the gradients that a backward quantised, and make the updates that are due."""
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
    """The numbered casts of this phase that belong to slots; those of recomputes are not staged."""
    casts = enumerate(seen.casts)
    return [(n, cast) for n, cast in casts if cast.slot is not None and cast.at.phase == phase]


def _settings_of(event: Backward, progress: Progress) -> Settings | None:
    """The settings under which a backward's forwards ran in FP8; those of the first if they differ,
    None if none did."""
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
        return owed  # the segments' deviation is applied in ``_backward``
    # the library lets the first layer update, unless each layer has a region of its own
    each = run.each and bool(inside & set(event.of))
    if run.layout == "dangling" and not each and "first_layer_owns_update" in deviations:
        return False
    return library.updates(event.of, owed, deviations)
