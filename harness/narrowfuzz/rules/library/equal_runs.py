"""Two runs of a library's layers that must be the same: with and without a checkpoint, after other
models, through a reload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from narrowfuzz.case import altered
from narrowfuzz.case.events import Event, Forward, Reload
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.library.contract import separates
from narrowfuzz.rules.library.evidence import order_lost
from narrowfuzz.rules.rule import diverged, number, plain
from narrowfuzz.rules.state.blame import blamed
from narrowfuzz.rules.state.run import by_library
from narrowfuzz.rules.state.symptoms import described, differing, unfinished
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Runs, Same
from narrowfuzz.trace.snapshots import Moment
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict


def check_twin(evidence: Evidence) -> Iterator[Verdict]:
    """O12: checkpointed equals plain, in outputs, gradients and state after every event."""
    base = evidence.in_one_process.get("eager")
    for arm, trace in evidence.in_one_process.items():
        if not BY_NAME[arm].recomputes or base is None:
            continue
        if base.error is not None or trace.error is not None:
            yield plain("O12", arm, "output", "inconclusive", "one of the runs failed")
            continue
        until = order_lost(evidence.spec) if arm.endswith("reentrant") else len(base.moments)
        base, trace = (
            _until(evidence.spec, base, until),
            _until(evidence.spec, trace, until),
        )
        verdict = same(evidence, "O12", arm, base, trace, range(until), PLAIN)
        if verdict.status == "diverged":
            runs = [replace(evidence, traces={t.arm: t}) for t in (base, trace)]
            verdict = blamed(verdict, *runs, alike=True)
        yield verdict


def _until(spec: Spec, trace: Trace, until: int) -> Trace:
    """The trace before event ``until``."""
    forwards = sum(isinstance(event, Forward) for event in spec.events[:until])

    def before(name: str) -> bool:
        number = name_of(name).number  # of a gradient its event; an output is y<forward>
        return int(number) < until if number else int(name[1:]) < forwards

    outputs = {name: x for name, x in trace.outputs.items() if before(name)}
    return replace(trace, moments=trace.moments[:until], outputs=outputs)


#: The names of runs in addresses: of the schedule without recomputing, without reloads, of the
#: first model of a process, and of a later one.
PLAIN, THROUGH, ALONE = "without it", "uninterrupted", "alone in its process"
AFTER_OTHERS = "after other models"


def check_after_others(evidence: Evidence) -> Iterator[Verdict]:
    """O1: a model behaves the same as the only one of its process and after other models."""
    if evidence.own_layers.after_others is None:
        yield plain("O1", "eager", "output", "not_applicable")
        return
    after = evidence.own_layers.after_others()
    if after.error is not None:
        whole = replace(after.error, event=len(evidence.spec.events))  # all of it ran before
        symptom = f"{after.error.type} after other models{separates(evidence, whole)}"
        at = At(what="error", event=after.error.event, name=after.error.where, run=AFTER_OTHERS)
        got, expect = after.error.message[:200], Runs(after.error.type)
        yield diverged("O1", after.arm, "schedule", symptom, at, got, expect)
        return
    base, moments = evidence.in_one_process[after.arm], range(len(after.moments))
    verdict = same(evidence, "O1", after.arm, base, after, moments, ALONE)
    symptom = verdict.symptom
    if symptom and evidence.spec.quantized_init:
        symptom += ", FP8 parameters"
    if symptom and by_library(after.arm):
        symptom += unfinished(evidence.spec)
    yield replace(verdict, symptom=symptom)


def check_reload(evidence: Evidence) -> Iterator[Verdict]:
    """R20: saving, loading and continuing gives the same as continuing."""
    base = evidence.in_one_process.get("eager")
    if evidence.own_layers.gradient_rounding == "stochastic":
        why = "new layers draw random numbers, too: casts after a reload round otherwise"
        yield plain("R20", "eager", "output", "not_applicable", why)
        return
    events = evidence.spec.events
    indices = [i for i, event in enumerate(events) if not isinstance(event, Reload)]
    if (
        base is None
        or base.error is not None
        or evidence.own_layers.run is None
        or len(indices) == len(events)
    ):
        yield plain("R20", "eager", "output", "not_applicable")
        return
    through = through_reloads(evidence.spec)
    uninterrupted = evidence.own_layers.run(through)
    if uninterrupted.error is not None:
        yield plain("R20", "eager", "output", "inconclusive", "the run without it failed")
        return
    moments = _run_since_reload(events, base.moments)
    reloaded = replace(base, moments=tuple(moments[i] for i in indices))
    whole = replace(uninterrupted, moments=tuple(uninterrupted.moments[i] for i in indices))
    verdict = same(evidence, "R20", "eager", whole, reloaded, indices, THROUGH)
    if verdict.status == "diverged":
        case = msgspec.structs.replace(evidence.case, spec=through)
        plainly = replace(evidence, case=case, traces={"eager": uninterrupted})
        yield blamed(verdict, plainly, replace(evidence, traces={"eager": base}), alike=False)
    else:
        yield verdict


def through_reloads(spec: Spec) -> Spec:
    """The same training, but nothing happens where the model reloads."""
    return msgspec.structs.replace(spec, events=altered.through_reloads(spec.events))


def _run_since_reload(events: Sequence[Event], moments: Sequence[Moment]) -> list[Moment]:
    """The moments with the state of layers that have run since they were loaded: before that, a
    layer takes part in no update, and may have no state at all."""
    ran: set[str] | None = None
    found = []
    for event, moment in zip(events, moments, strict=True):
        if isinstance(event, Reload):
            ran = set()
        elif ran is not None:
            ran |= {call.layer for call in moment.calls}
            state = {n: slot for n, slot in moment.state.items() if n.layer.split(".")[0] in ran}
            moment = replace(moment, state=state)
        found.append(moment)
    return found


def same(
    evidence: Evidence,
    rule: str,
    arm: str,
    base: Trace,
    other: Trace,
    events: Iterable[int],
    than: str,
) -> Verdict:
    """Compares, bit for bit, the state after every event, outputs and gradients; addresses call the
    ``base`` run ``than``."""
    for i, a, b in zip(events, base.moments, other.moments, strict=False):
        for slot in sorted(a.state.keys() & b.state.keys()):
            if not a.state[slot].equals(b.state[slot]):
                at = slot.at(i)
                actual = differing(b.state[slot], a.state[slot])
                expect = Same(msgspec.structs.replace(at, run=than), described(a.state[slot]))
                return diverged(rule, arm, "state", f"{slot.direction} state", at, actual, expect)
    for name in base.outputs:
        got = other.outputs.get(name)
        if got is None or not _same_bits(base.outputs[name], got):
            kind = "gradient" if "grad" in name else "output"
            actual = "none" if got is None else _furthest(base.outputs[name], got)
            expect = Same(At(name=name, run=than))
            return diverged(rule, arm, kind, kind, At(name=name), actual, expect)
    return plain(rule, arm, "output", "ok")


def _same_bits(a: F32, b: F32) -> bool:
    return a.shape == b.shape and bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())


def _furthest(a: F32, b: F32) -> str:
    if a.shape != b.shape:
        return f"shape {b.shape}"
    with np.errstate(all="ignore"):
        bad = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    at = np.argwhere(bad)[0]
    values = f"{number(float(b[tuple(at)]))} for {number(float(a[tuple(at)]))}"
    return f"{int(bad.sum())} of {a.size} elements differ, first {values}"
