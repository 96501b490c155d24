"""O14: after every event, scales and windows are what the recipe's rules make of what was seen.

The machine (narrowfuzz.numerics.delayed) is driven by the schedule and by the true maxima of the
tensors that were really quantised, so no number of the library enters what is expected of it.
After a divergence it goes on from what was observed: the next cause is seen, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from narrowfuzz.expect import Is, Own, State, bits
from narrowfuzz.moments import CastSeen, Moment, SlotName
from narrowfuzz.numerics.delayed import FMAX, Policy, Slot, committed, fresh, resized, staged
from narrowfuzz.numerics.follow import Move
from narrowfuzz.oracles.oracle import number, plain
from narrowfuzz.oracles.schedule_as_built import AsBuilt
from narrowfuzz.oracles.schedule_evidence import (
    LibraryEvidence,
    Progress,
    steps_of,
)
from narrowfuzz.oracles.schedule_recompute import Recomputes
from narrowfuzz.oracles.schedule_symptoms import differing, placed, symptom_of, told
from narrowfuzz.schedule.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Settings,
    Step,
)
from narrowfuzz.trace import Trace
from narrowfuzz.verdict import FOLLOWED, Verdict


def check_machine(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """O14 on every arm."""
    for arm, trace in evidence.traces.items():
        if evidence.kind != "delayed":
            yield _stateless(evidence, trace)
            continue
        if not any(m.casts for m in trace.moments):
            # the true maxima are the machine's only input
            yield plain("O14", arm, "state", "inconclusive", "no cast was seen")
            continue
        found = list(_follow(_fresh(evidence, trace), trace))
        yield from found
        if not found:
            judged = any(moment.state for moment in trace.moments)
            yield plain("O14", arm, "state", "ok" if judged else "not_applicable")


def _stateless(evidence: LibraryEvidence, trace: Trace) -> Verdict:
    """A recipe that measures each tensor anew keeps no scale and no window."""
    for moment in trace.moments:
        for name, slot in sorted(moment.state.items()):
            return Verdict(
                "O14", trace.arm, name.direction, "diverged", f"{name.direction} state kept",
                name.at(moment.event), told(slot), Own("nothing"),
            )  # fmt: skip
    return plain("O14", trace.arm, "state", "ok" if trace.moments else "not_applicable")


def moves(evidence: LibraryEvidence, trace: Trace, slot: SlotName) -> dict[int, list[Move]]:
    """What the slot's state owes to each event of this run, in order."""
    machine = _fresh(evidence, trace)
    for _ in _follow(machine, trace):
        pass
    found: dict[int, list[Move]] = {}
    for event, name, move in machine.moves:
        if name == slot:
            found.setdefault(event, []).append(move)
    return found


@dataclass
class _Machine:
    """Expected state, and what is staged in it."""

    evidence: LibraryEvidence
    arm: str
    as_built: AsBuilt
    recomputes: Recomputes
    event: int = 0
    #: What each slot owes to an event; "cut" is a resize as built.
    moves: list[tuple[int, SlotName, Move]] = field(default_factory=list)
    slots: dict[SlotName, Slot] = field(default_factory=dict)
    #: As ``slots``, had the last commit not happened.
    uncommitted: dict[SlotName, Slot] = field(default_factory=dict)
    #: What a commit of this event makes of a slot in the other arithmetic, where that differs: a
    #: library's bulk update divides, its tensor by tensor path multiplies by a reciprocal, and
    #: nothing says which of the two an update must take.
    either: dict[SlotName, Slot] = field(default_factory=dict)
    #: Quantised by some forward so far: all others' scales are not the schedule's doing.
    ran: set[SlotName] = field(default_factory=set)
    #: Staged since their last commit, and under which settings.
    waiting: dict[SlotName, Settings] = field(default_factory=dict)

    def stage(self, cast: CastSeen, settings: Settings) -> None:
        assert cast.slot is not None
        self.slots[cast.slot] = staged(self.slots[cast.slot], cast.amax)
        self.waiting[cast.slot] = settings
        self.moves.append((self.event, cast.slot, ("stage",)))

    def resize(self, layer: str, history: int) -> None:
        """A forward gives all windows of its layer the length its recipe asks for."""
        for name in [n for n in self.slots if n.layer == layer]:
            before = self.slots[name]
            self.slots[name] = self.as_built.resized(before, history)
            if len(before.window) != history:
                rule = self.slots[name].equals(resized(before, history))
                kind = "resize" if rule else "cut"
                self.moves.append((self.event, name, (kind, history)))

    def commit(self, direction: str) -> None:
        """Update what was staged."""
        for name in [n for n in self.slots if n.direction == direction]:
            before, idle = self.slots[name], name not in self.waiting
            first = self.as_built.registered.get(name.layer)
            settings = self.waiting.get(name, first)
            if settings is None:
                continue  # it has not run since it was built or loaded, and nothing waits
            if first is None and self.as_built.follows("loaded_layers_wait"):
                continue
            self.waiting.pop(name, None)
            policy = self._policy(name, settings)
            kind = policy.forward if name.direction == "forward" else policy.backward
            after = committed(before, policy, FMAX[kind])
            if not idle:
                self.uncommitted[name] = before
            elif not self.as_built.follows("idle_windows_roll", differs=not after.equals(before)):
                continue
            self.slots[name] = after
            turned = replace(policy, reciprocal=not policy.reciprocal)
            self.either[name] = committed(before, turned, FMAX[kind])
            self.moves.append((self.event, name, ("commit", policy)))

    def _policy(self, name: SlotName, settings: Settings) -> Policy:
        policy = self.evidence.policy(self.as_built.settings(name.layer, settings))
        assert policy is not None  # nothing is staged without one
        return policy


def _fresh(evidence: LibraryEvidence, trace: Trace) -> _Machine:
    as_built = AsBuilt(evidence.deviations)
    recomputes = Recomputes(trace.arm, evidence.spec, as_built)
    return _Machine(evidence, trace.arm, as_built, recomputes)


def _follow(machine: _Machine, trace: Trace) -> Iterator[Verdict]:
    evidence = machine.evidence
    told: set[str] = set()
    for (i, event, progress), moment in zip(steps_of(evidence.spec), trace.moments, strict=False):
        before = dict(machine.slots)
        machine.event = machine.as_built.event = i
        machine.uncommitted, machine.either = {}, {}
        machine.recomputes.event(event, progress, moment)
        _book(machine, event, progress, moment)
        rule = _by_the_rule(machine, event, progress, moment)
        for verdict in _casts(machine, event, progress, moment):
            if verdict.symptom not in told:
                told.add(verdict.symptom)
                yield placed(verdict, evidence, trace, i)
        _commits(machine, event, progress)
        if isinstance(event, Step) and evidence.spec.quantized_init:
            _written(machine, moment)
        if rule is not None:
            differs = rule != {name: slot.key() for name, slot in machine.slots.items()}
            machine.as_built.follows("segments_update_gradients", differs=differs)
        for verdict in _compare(machine, before, event, moment):
            if verdict.symptom not in told:
                told.add(verdict.symptom)
                yield placed(verdict, evidence, trace, i)
    for entry, events in sorted(machine.as_built.followed.items()):
        yield plain("O14", trace.arm, FOLLOWED, "ok", ", ".join(sorted(events))).known(entry)


def _copy(machine: _Machine) -> _Machine:
    """To try something out on."""
    return replace(
        machine,
        as_built=replace(machine.as_built, followed={}),
        moves=[],
        slots=dict(machine.slots),
        uncommitted={},
        either={},
        waiting=dict(machine.waiting),
    )


def _by_the_rule(
    machine: _Machine, event: Event, progress: Progress, moment: Moment
) -> dict[SlotName, tuple[bytes, bytes]] | None:
    """State after a backward whose layers update gradients again and again, had they not; nothing,
    which no state is, if they already saw other scales."""
    if not (isinstance(event, Backward) and machine.recomputes.told_again):
        return None
    other = _copy(machine)
    other.recomputes = replace(machine.recomputes, told_again=False, owns=False)
    if any(_casts(other, event, progress, moment)):
        return {}
    _commits(other, event, progress)
    return {name: slot.key() for name, slot in other.slots.items()}


def _book(machine: _Machine, event: Event, progress: Progress, moment: Moment) -> None:
    """What the library writes down about this event, and what it forgets in it."""
    as_built = machine.as_built
    match event:
        case Open(enabled=enabled):
            as_built.entered(progress.settings if enabled else None)
        case Close():
            as_built.left()
        case Forward(inside=inside, mode=mode):
            inner = progress.inner(event)
            if inside:
                as_built.entered(inner)
            if inner is not None and mode == "train" and not machine.recomputes.reentrant:
                as_built.trained(progress.forwards)
            if inside:
                as_built.left()
            for call in moment.calls:
                as_built.called(call.layer, inner)
        case Reload():
            lost = as_built.reloaded(machine.slots)
            machine.ran -= lost
            for name in lost & machine.waiting.keys():
                del machine.waiting[name]
            for name in lost:
                machine.moves.append((machine.event, name, ("lose",)))


def _casts(
    machine: _Machine, event: Event, progress: Progress, moment: Moment
) -> Iterator[Verdict]:
    """Stage what this event quantised; each cast must have used its slot's scale."""
    policy_of = machine.evidence.policy
    inner = progress.inner(event) if isinstance(event, Forward) else None
    trains = isinstance(event, Forward) and event.mode == "train"
    call, modules = None, machine.recomputes.modules()
    for cast in moment.casts:
        if cast.slot is None or cast.at.phase == "recompute":
            continue
        settings = inner if cast.at.phase == "forward" else _settings_of(event, progress)
        policy = policy_of(settings) if settings is not None else None
        if settings is None or policy is None:
            continue  # a cast in high precision is another rule's business
        if call is not None and cast.at.call != call and _own_region(machine, event, progress):
            _leave_own_region(machine)
        backward = cast.at.phase == "backward"
        if backward and modules.updates_before(cast.slot) and machine.recomputes.owns:
            machine.commit("backward")
        call = cast.at.call
        machine.ran.add(cast.slot)
        if cast.at.phase == "forward":
            machine.as_built.ran(cast.slot.layer, settings)
            machine.resize(cast.slot.layer, policy.history)
        if cast.slot not in machine.slots:
            machine.slots[cast.slot] = fresh(policy.history)
            if policy.history != machine.evidence.spec.settings.history:
                first = ("resize", policy.history)
                machine.moves.append((machine.event, cast.slot, first))
        slot = machine.slots[cast.slot]
        other = machine.either.pop(cast.slot, slot)
        if cast.scale == other.scale:
            slot = machine.slots[cast.slot] = other
        if cast.scale != slot.scale:
            yield Verdict(
                "O14", "", cast.slot.direction, "diverged",
                f"{cast.slot.direction} cast with another scale than its slot's",
                msgspec.structs.replace(cast.slot.at(), what="cast"),
                number(float(cast.scale or 0)), Is(bits(slot.scale)),
            )  # fmt: skip
        trained = cast.at.phase == "backward" or trains
        if trained or machine.as_built.follows("evaluation_stages"):
            machine.stage(cast, settings)


def _settings_of(event: Event, progress: Progress) -> Settings | None:
    """What the forwards of a backward ran under; the first's, where they differ."""
    assert isinstance(event, Backward)
    ran = [progress.ran[f][0] for f in event.of if f in progress.ran]
    return ran[0] if ran else None


def _own_region(machine: _Machine, event: Event, progress: Progress) -> bool:
    """True where each layer call of this forward opens an outermost region of its own."""
    spec = machine.evidence.spec
    return (
        isinstance(event, Forward)
        and event.inside
        and event.mode == "train"
        and not progress.open
        and spec.region in ("each", "nested")
    )


def _commits(machine: _Machine, event: Event, progress: Progress) -> None:
    """The updates this event owes."""
    as_built = machine.as_built
    if isinstance(event, Close) and len(progress.open) == 1:
        waits = any(name.direction == "forward" for name in machine.waiting)
        high = progress.open[0] is None and as_built.follows("disabled_region_keeps", differs=waits)
        if not high:
            machine.commit("forward")
    if isinstance(event, Forward) and event.inside and event.mode == "train" and not progress.open:
        _leave_own_region(machine)  # in no_grad, a region is left without an update
    if isinstance(event, Backward):
        if machine.recomputes.told_again:
            told = machine.recomputes.owns
        else:
            told = _updates_gradients(machine, event, progress)
        if told:
            machine.commit("backward")
        _update_again(machine)


def _leave_own_region(machine: _Machine) -> None:
    waits = any(name.direction == "forward" for name in machine.waiting)
    if not machine.recomputes.keeps(waits):
        machine.commit("forward")


def _update_again(machine: _Machine) -> None:
    """Recomputes that leave a region of their own update what runs forward once more."""
    for deviation, times in machine.recomputes.updates.items():
        _commit_forward_by(machine, deviation, times)


def _written(machine: _Machine, moment: Moment) -> None:
    """Parameters in the narrow format are written one by one, and the last may update: which is
    the last depends on models long gone, so what was observed decides, layer by layer."""
    trial = _copy(machine)
    trial.commit("forward")
    for name, now in moment.state.items():
        after = trial.slots.get(name)
        if name not in machine.ran or after is None or after.equals(machine.slots[name]):
            continue
        if now.equals(after) and machine.as_built.follows("writing_parameters_updates_forward"):
            machine.slots[name] = after
            machine.waiting.pop(name, None)
            machine.moves += [move for move in trial.moves if move[1] == name]


def _commit_forward_by(machine: _Machine, deviation: str, times: int) -> None:
    if times and machine.as_built.follows(deviation, differs=False):
        before = dict(machine.slots)
        for _ in range(times):
            machine.commit("forward")
        differs = any(not machine.slots[name].equals(before[name]) for name in before)
        machine.as_built.follows(deviation, differs=differs)


def _updates_gradients(machine: _Machine, event: Backward, progress: Progress) -> bool:
    spec, as_built = machine.evidence.spec, machine.as_built
    ran = [progress.ran[f] for f in event.of if f in progress.ran]
    policies = [(machine.evidence.policy(settings), region) for settings, region in ran]
    owed = any(
        policy is not None and (policy.backward_commits == "each" or region.first in event.of)
        for policy, region in policies
    )
    if machine.arm.endswith("reentrant"):
        return owed  # what each segment's recompute is told is another matter
    updates = as_built.updates(event.of, owed)
    # the first layer is told to, unless each layer has a region of its own
    inside = machine.recomputes.inside & set(event.of)
    each = spec.region in ("each", "nested") and bool(inside)
    if spec.layout == "dangling" and not each:
        return updates and not as_built.follows("first_layer_owns_update", differs=updates)
    return updates


def _compare(
    machine: _Machine, before: dict[SlotName, Slot], event: Event, moment: Moment
) -> Iterator[Verdict]:
    quantised = machine.evidence.spec.quantized_init
    for name, got in sorted(moment.state.items()):
        if quantised and name not in machine.ran:  # a parameter's own: written when it is
            machine.slots[name] = got
            continue
        want = machine.slots.get(name)
        if want is None:
            want = fresh(len(got.window))
        if isinstance(event, Reload) or name not in machine.waiting:
            want = resized(want, len(got.window)) if want.equals(fresh(len(want.window))) else want
        legal = (want, machine.either.get(name, want))
        if not any(got.equals(one) for one in legal):
            unstaged = machine.uncommitted.get(name)
            symptom = symptom_of(name, event, before.get(name), want, got, unstaged)
            yield Verdict(
                "O14", "", name.direction, "diverged", symptom, name.at(), differing(got, want),
                State(bits(want.scale), tuple(bits(x) for x in want.window)),
            )  # fmt: skip
        machine.slots[name] = got
