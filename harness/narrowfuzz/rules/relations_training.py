"""Relations of a training's events: what its results may not depend on (R24-R27, R29).

An evaluation, a save and a load, the order in which waiting graphs run backward, and a second
run of a graph that was kept: none of them is part of the mathematics of a training.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narrowfuzz.case.altered import evaluations_dropped, in_order, reloads_dropped
from narrowfuzz.case.event_data import with_events
from narrowfuzz.case.events import Backward, Event, Forward, Open, Step, numbered
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.rules.evidence import BY_CHANCE, Evidence, same_bits
from narrowfuzz.rules.relations_state import other_layout
from narrowfuzz.rules.rule import diverged, diverged_from, plain
from narrowfuzz.rules.whole import role_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Same
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import OtherRun, Verdict

#: (number of a training forward, number of the backward through it): the gradient of an input; with
#: -1 for the backward: the forward's output.
_Key = tuple[int, int]


def check_evaluations(evidence: Evidence) -> Iterator[Verdict]:
    """R24: forwards without an autograd graph (evaluations) change no result of a training."""
    spec = evidence.spec
    without_graph = any(isinstance(e, Forward) and e.mode == "no_grad" for e in spec.events)
    why = "its forwards draw random numbers" if evidence.twin is None and without_graph else ""
    if without_graph and MODELS[spec.model].remembers:
        why = "its forwards without a graph change what later forwards read"
    if any(isinstance(event, Open) for event in spec.events) and _three_addends(evidence):
        # the region's forwards share the cast of a weight that the evaluation made
        why = "in a region an evaluation changes the order in which a weight's gradients are added"
    changed = evaluations_dropped(spec.events)
    yield _same_training(
        evidence, "R24", changed, "without its evaluations", "changed by an evaluation", why
    )


def check_reloads(evidence: Evidence) -> Iterator[Verdict]:
    """R25: a training that is saved, and loaded into a new model, continues with the same bits."""
    changed = reloads_dropped(evidence.spec.events)
    why = other_layout(evidence.spec)
    why = "a new model draws random numbers" if evidence.twin is None else why
    yield _same_training(
        evidence, "R25", changed, "without its reloads", "changed by a reload", why
    )


def check_order(evidence: Evidence) -> Iterator[Verdict]:
    """R26: several graphs that wait for their backwards give the same as one graph at a time.

    A parameter's gradient has the same bits in any order of two addends, not of three.
    """
    spec = evidence.spec
    changed = in_order(spec.events)
    why = "sums of three may be made in any order" if _most_addends(spec.events) > 2 else ""
    if evidence.tied or _called_twice(evidence):
        why = "a linear is called twice in a forward"
    if MODELS[spec.model].gradients.reused:
        why = "a parameter may be used several times in a forward"
    if spec.sums_forwards and any(isinstance(event, Open) for event in spec.events):
        why = "forwards of one region share the casts of their weights, whose gradients add up"
    if evidence.twin is None:
        why = "random numbers are drawn in another order"
    yield _same_training(
        evidence, "R26", changed, "one graph at a time", "changed by graphs that wait", why
    )


def check_kept_graph(evidence: Evidence) -> Iterator[Verdict]:
    """R27: a kept graph that runs backward again on the same gradient gives the same gradient."""
    if any(evidence.by_chance(role) for role in ROLES):
        yield plain("R27", evidence.base, "grad_input", "not_applicable", BY_CHANCE)
        return
    base = evidence.traces.get(evidence.base)
    if base is None or base.error is not None:
        yield plain("R27", evidence.base, "grad_input", "not_applicable", "not run in eager")
        return
    results, names = base.outputs, _names(evidence.spec.events)
    before: dict[int, tuple[Backward, str]] = {}
    judged = False
    for key, event in _backwards(evidence.spec.events).items():
        turn, name = key[0], names[key]
        last, there = before.get(turn, (None, ""))
        before[turn] = event, name
        alike = last and (last.values, last.shift) == (event.values, event.shift)
        if not alike or not {name, there} <= results.keys():
            continue
        judged = True
        bad = ~same_bits(results[name], results[there])
        if bad.any():
            symptom, runs = "another gradient the second time", (results[name], results[there])
            here, than = At(name=name), At(name=there)
            yield diverged_from("R27", evidence.base, "grad_input", symptom, here, than, *runs)
            return
    yield plain("R27", evidence.base, "grad_input", "ok" if judged else "not_applicable")


def check_loss_scaling(evidence: Evidence) -> Iterator[Verdict]:
    """R29: GradScaler's steps are those of its definition.

    A scale that is a power of two divides gradients exactly, so both give the same bits.
    """
    spec, base = evidence.spec, evidence.base
    if spec.loss_scaling != "grad_scaler" or not spec.optimizes:
        yield plain("R29", base, "parameter", "not_applicable", "no GradScaler steps")
        return
    if any(evidence.by_chance(role) for role in ROLES):
        yield plain("R29", base, "parameter", "not_applicable", BY_CHANCE)
        return
    other = msgspec.structs.replace(spec, loss_scaling="by_hand")
    run = OtherRun("GradScaler's definition", other, evidence.tensors)
    yield _rerun(evidence, "R29", run, "not what the definition of GradScaler leaves")


def _same_training(
    evidence: Evidence,
    name: str,
    events: tuple[Event, ...],
    title: str,
    symptom: str,
    why: str = "",
) -> Verdict:
    """Compares with a training of other events, which gives the same in exact arithmetic."""
    spec = evidence.spec
    if events == spec.events or not spec.trains:
        return plain(name, evidence.base, "output", "not_applicable", "nothing to leave out")
    if not why and any(evidence.by_chance(role) for role in ROLES):
        why = BY_CHANCE
    if why:
        return plain(name, evidence.base, "output", "not_applicable", why)
    other_spec = msgspec.structs.replace(spec, events=events)
    other = OtherRun(title, other_spec, with_events(other_spec, evidence.tensors))
    return _rerun(evidence, name, other, symptom)


def _rerun(evidence: Evidence, name: str, other: OtherRun, symptom: str) -> Verdict:
    """Runs ``other`` and compares its results with those of this run."""
    assert evidence.rerun is not None
    after = evidence.rerun(dict(other.tensors), other.spec, "")
    if after.error is not None:
        return plain(name, evidence.base, "output", "inconclusive", "the rerun failed")
    return _compared(evidence, name, after, other, symptom)


def _compared(
    evidence: Evidence, name: str, after: Trace, other: OtherRun, symptom: str
) -> Verdict:
    mine = evidence.traces[evidence.base].outputs
    for here, there in _pairs(evidence.spec.events, other.spec.events, mine):
        got, want = mine.get(here), after.outputs.get(there)
        if got is None and want is None:
            continue
        place = name, evidence.base, role_of(here)
        at, than = At(name=here), At(name=there, run=other.name)
        if got is None or want is None:
            symptom, actual = f"{symptom}: there in one run only", "one run without it"
            return diverged(*place, symptom, at, actual, Same(than), runs=(other,))
        if not same_bits(got, want).all():
            return diverged_from(*place, symptom, at, than, got, want, runs=(other,))
    nothing = not any(x.any() for x in mine.values())
    why = "zeros in both runs" if nothing else ""
    return plain(name, evidence.base, "output", "inconclusive" if nothing else "ok", why)


def _pairs(
    events: tuple[Event, ...], others: tuple[Event, ...], results: dict[str, F32]
) -> Iterator[tuple[str, str]]:
    """Names of the same result in both runs, in the order they are computed. Buffers may count
    evaluations, so they are the same only after as many forwards."""
    mine, theirs = _names(events), _names(others)
    yield from ((mine[key], theirs[key]) for key in mine if key in theirs)
    roles = {"grad_parameter", "clipped", "parameter", "loss_scale", "norm"}
    if _forwards(events) == _forwards(others):
        roles.add("buffer")
    for name in results:
        if role_of(name) in roles:
            yield name, name


def _names(events: tuple[Event, ...]) -> dict[_Key, str]:
    """The result names of the outputs and input gradients of the training forwards."""
    forwards = [e for e in events if isinstance(e, Forward)]
    turns = _turns(events)
    found = {(turns[f], -1): _called("output", f, len(forwards)) for f in turns}
    backwards = _backwards(events)
    for i, key in enumerate(backwards):
        found[key] = _called("grad_input", i, len(backwards))
    return found


def _forwards(events: tuple[Event, ...]) -> int:
    return sum(isinstance(event, Forward) for event in events)


def _called(kind: str, which: int, of: int) -> str:
    return kind if which == of - 1 else f"{kind}@{which}"


def _turns(events: tuple[Event, ...]) -> dict[int, int]:
    """Number of a training forward among all forwards -> its number among the training forwards."""
    trains = [n for n, e in numbered(events) if isinstance(e, Forward) and e.mode == "train"]
    return {number: turn for turn, number in enumerate(trains)}


def _backwards(events: tuple[Event, ...]) -> dict[_Key, Backward]:
    """(number of the training forward, number of the backward through it) -> the backward, in the
    order that they run."""
    turns, seen = _turns(events), dict[int, int]()
    found: dict[_Key, Backward] = {}
    for event in events:
        if isinstance(event, Backward):
            for f in event.of:
                found[turns[f], seen.get(f, 0)] = event
                seen[f] = seen.get(f, 0) + 1
    return found


def _most_addends(events: tuple[Event, ...]) -> int:
    """The largest number of forwards through which backwards run between two steps."""
    most = now = 0
    for event in events:
        now = 0 if isinstance(event, Step) else now
        now += len(event.of) if isinstance(event, Backward) else 0
        most = max(most, now)
    return most


def _three_addends(evidence: Evidence) -> bool:
    """May one backward add up three gradients of a weight? Two have one sum in any order."""
    backwards = (event for event in evidence.spec.events if isinstance(event, Backward))
    forwards = max((len(event.of) for event in backwards), default=0)
    uses = 2 if evidence.tied or _called_twice(evidence) else 1
    return forwards * uses > 2


def _called_twice(evidence: Evidence) -> bool:
    """Does a forward call some linear more than once?"""
    calls = [
        (call.module, call.forward)
        for call in evidence.traces[evidence.base].calls
        if call.phase == "forward"
    ]
    return len(set(calls)) < len(calls)
