"""O14: after every event, scales and windows are those that the recipe's rules give for the maxima
that were observed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narrowfuzz.case.events import Reload
from narrowfuzz.numerics.delayed import fresh
from narrowfuzz.numerics.follow import Move
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.evidence import steps_of
from narrowfuzz.rules.rule import diverged, plain, unequal
from narrowfuzz.rules.state.fold import Turn, expected
from narrowfuzz.rules.state.outcome import Outcome
from narrowfuzz.rules.state.plan import Begin, Commit, Lose, Quantise, Resize
from narrowfuzz.rules.state.plan import Move as Done
from narrowfuzz.rules.state.run import run_of
from narrowfuzz.rules.state.symptoms import described, differing, placed, symptom_of
from narrowfuzz.trace.expect import Own, State, bits
from narrowfuzz.trace.snapshots import SlotName
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import FOLLOWED, Verdict


def check_machine(evidence: Evidence) -> Iterator[Verdict]:
    """O14 for every arm in one process."""
    for arm, trace in evidence.in_one_process.items():
        if evidence.own_layers.kind != "delayed":
            yield _stateless(evidence, trace)
            continue
        if not any(m.casts for m in trace.moments):
            # the true maxima are the machine's only input
            yield plain("O14", arm, "state", "inconclusive", "no cast was seen")
            continue
        found = list(judged(evidence, trace))
        yield from found
        if not found:
            has_state = any(moment.state for moment in trace.moments)
            yield plain("O14", arm, "state", "ok" if has_state else "not_applicable")


def _stateless(evidence: Evidence, trace: Trace) -> Verdict:
    """Judges a recipe that measures each tensor anew: it must keep no scale and no window."""
    for moment in trace.moments:
        for name, slot in sorted(moment.state.items()):
            symptom, at, actual = (
                f"{name.direction} state kept",
                name.at(moment.event),
                described(slot),
            )
            return diverged("O14", trace.arm, name.direction, symptom, at, actual, Own("nothing"))
    return plain("O14", trace.arm, "state", "ok" if trace.moments else "not_applicable")


def moves(evidence: Evidence, trace: Trace, slot: SlotName) -> dict[int, list[Move]]:
    """Event -> its moves on the state of this slot, in order."""
    found: dict[int, list[Move]] = {}
    for turn in _turns(evidence, trace):
        if slot in turn.outcomes:
            done = turn.outcomes[slot].done
            owed = [move for one in done if (move := _move(one, evidence)) is not None]
            if owed:
                found[turn.number] = owed
    return found


def _move(done: Done, evidence: Evidence) -> Move | None:
    """The move in the form that a script repeats, None if it need not. In a script every window
    begins with the length of the first settings."""
    match done:
        case Begin(history):
            usual = evidence.spec.settings.history
            return ("resize", history) if history != usual else None
        case Lose():
            return ("lose",)
        case Resize(history, cut):
            return ("cut" if cut else "resize", history)
        case Quantise():
            return ("stage",)
        case Commit(policy):
            return ("commit", policy)


def _turns(evidence: Evidence, trace: Trace) -> Iterator[Turn]:
    """The events of the run, folded under the ledger's deviations."""
    run, steps = run_of(evidence, trace.arm), steps_of(evidence.spec)
    return expected(run, steps, trace.moments, frozenset(evidence.deviations))


def judged(evidence: Evidence, trace: Trace) -> Iterator[Verdict]:
    """The first divergence of each class, and a known verdict for each known issue whose deviation
    was followed."""
    classes: set[str] = set()
    entries: dict[str, set[str]] = {}
    quantised = evidence.spec.quantized_init
    for turn in _turns(evidence, trace):
        for verdict in (*_casts(turn), *_states(turn, quantised=quantised)):
            if verdict.symptom not in classes:
                classes.add(verdict.symptom)
                yield placed(verdict, evidence, trace, turn.number)
        for deviation, where in turn.followed.items():
            entries.setdefault(evidence.deviations[deviation], set()).update(where)
    for entry, places in sorted(entries.items()):
        yield plain("O14", trace.arm, FOLLOWED, "ok", ", ".join(sorted(places))).known(entry)


def _casts(turn: Turn) -> Iterator[Verdict]:
    """Each cast must have used its slot's scale."""
    miscasts = sorted(miscast for after in turn.outcomes.values() for miscast in after.miscasts)
    for place, scale in miscasts:
        cast = turn.seen.casts[place]
        assert cast.slot is not None
        role, at = cast.slot.direction, msgspec.structs.replace(cast.slot.at(), what="cast")
        symptom = f"{role} cast with another scale than its slot's"
        yield unequal("O14", "", role, symptom, at, float(cast.scale or 0), scale)


def _states(turn: Turn, *, quantised: bool) -> Iterator[Verdict]:
    """Each slot must hold the state expected after the event; if parameters are ``quantised``, only
    slots that ran are judged."""
    after = turn.after
    for name, got in sorted(turn.seen.state.items()):
        if quantised and name not in after.ran:  # a parameter's slot, written when the parameter is
            continue
        length = len(got.window)
        want = after.slots.get(name) or fresh(length)
        idle = isinstance(turn.event, Reload) or name not in after.waiting
        if idle and len(want.window) != length and want.equals(fresh(len(want.window))):
            want = fresh(length)
        if got.equals(want):
            continue
        done = turn.outcomes.get(name) or Outcome(want)
        other = done.in_other_arithmetic()
        if other is None or not got.equals(other):
            before = turn.before.slots.get(name)
            symptom = symptom_of(name, turn.event, before, want, got, done.uncommitted)
            actual = differing(got, want)
            expect = State(bits(want.scale), tuple(bits(x) for x in want.window))
            yield diverged("O14", "", name.direction, symptom, name.at(), actual, expect)
