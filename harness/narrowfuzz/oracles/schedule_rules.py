"""The other rules of a schedule: recompute, precision, casts, twins, balance, save and load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from narrowfuzz.address import At
from narrowfuzz.arm import BY_NAME
from narrowfuzz.case import Spec
from narrowfuzz.expect import Formats, Is, Present, Runs, Same, bits
from narrowfuzz.moments import CastSeen, Moment, ProductSeen, Side
from narrowfuzz.numerics.formats import F32
from narrowfuzz.oracles.oracle import number, plain
from narrowfuzz.oracles.schedule_evidence import (
    LibraryEvidence,
    address_of,
    order_lost,
    steps_of,
)
from narrowfuzz.oracles.state.blame import blamed
from narrowfuzz.oracles.state.run import by_library
from narrowfuzz.oracles.state.symptoms import circumstances, described, differing, unfinished
from narrowfuzz.schedule import altered
from narrowfuzz.schedule.events import Backward, Event, Forward, Reload, Step, Switch
from narrowfuzz.trace import RunError, Trace
from narrowfuzz.verdict import Verdict


def check_contract(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """contract: what the library promises to run, it runs."""
    for arm, trace in evidence.traces.items():
        error = trace.error
        if error is None:
            yield plain("contract", arm, "schedule", "ok")
        elif error.type == "NotCarried":
            yield plain("contract", arm, "schedule", "unsupported", error.message)
        elif evidence.refusal:
            yield plain("contract", arm, "schedule", "not_applicable", evidence.refusal)
        else:
            symptom = f"{error.type} in {error.where}{_circumstances(evidence.spec, error)}"
            symptom += circumstances(evidence.spec, arm)
            yield Verdict(
                "contract", arm, "schedule", "crashed", symptom,
                At(what="error", event=error.event, name=error.where),
                f"{error.type}: {error.message[:200]}", Runs(error.type),
            )  # fmt: skip


def _circumstances(spec: Spec, error: RunError) -> str:
    """What separates failures of one function: what it fails with once another history has resized
    its windows, or where parameters in the narrow format meet a product outside regions."""
    if error.where.split(".")[0] in ("quantization", "fp8", "base"):
        history = spec.settings.history
        for event in spec.events[: max(error.event, 0)]:
            if isinstance(event, Switch) and event.history not in (None, history):
                return ", after a switch of the history"
    for i, event, progress in steps_of(spec):
        if i == error.event and isinstance(event, Forward) and spec.quantized_init:
            return "" if progress.inner(event) else ", quantised parameters outside regions"
    return ""


def check_recompute(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """O13: what a recompute quantises and multiplies is what the forward did."""
    for arm, trace in evidence.traces.items():
        if not BY_NAME[arm].recomputes:
            continue
        yield replace(_recomputed(evidence, trace), arm=arm)


def _recomputed(evidence: LibraryEvidence, trace: Trace) -> Verdict:
    judged = False
    forwards = [e for e in evidence.spec.events if isinstance(e, Forward)]
    kept = frozenset(i for i, event in enumerate(forwards) if event.first is False)
    first: dict[tuple[int, int], list[ProductSeen]] = {}
    layers: dict[tuple[int, int], str] = {}
    for moment in trace.moments:
        layers |= {(call.at.forward, call.at.call): call.layer for call in moment.calls}
        again: dict[tuple[int, int], list[ProductSeen]] = {}
        for product in moment.products:
            key = (product.at.forward, product.at.call)
            if product.at.phase == "forward":
                first.setdefault(key, []).append(product)
            elif product.at.phase == "recompute":
                again.setdefault(key, []).append(product)
        for key, products in again.items():
            judged = True
            wanted = first.get(key, [])
            for i, product in enumerate(products):
                want = wanted[i % len(wanted)] if wanted else None
                symptom = _differs(product, want)
                if (
                    symptom == _OTHER_SCALE
                    and want is not None
                    and _of_another(product, want, key, i, first, layers, kept)
                ):
                    symptom = "recomputed with the scales of another call"
                if symptom:
                    symptom += circumstances(evidence.spec, trace.arm)
                    place = address_of(At(what="product", name="output"), moment.event, product.at)
                    first_run = msgspec.structs.replace(place, event=-1, phase="forward")
                    return Verdict(
                        "O13", "", "output", "diverged", symptom, place, _sides(product),
                        Same(first_run, _sides(want) if want else "no product"),
                    )  # fmt: skip
    return plain("O13", "", "output", "ok" if judged else "not_applicable")


def _of_another(
    product: ProductSeen,
    want: ProductSeen,
    key: tuple[int, int],
    i: int,
    first: Mapping[tuple[int, int], list[ProductSeen]],
    layers: Mapping[tuple[int, int], str],
    kept: Collection[int],
) -> bool:
    """True if another call of the same layer ran the same product with these scales; a forward in
    ``kept`` multiplied a weight that was kept from before, with its scale of then, so there only
    the other operand tells, whichever side it stands on. A recompute of such a forward multiplies
    that weight again: there only what is not as in its forward tells."""
    sides = ((product.a, want.a), (product.b, want.b))
    moved = [side.inverse != wanted.inverse for side, wanted in sides]
    for other in (k for k in first if k != key and layers.get(k) == layers.get(key)):
        ran = first[other][i % len(first[other])]
        same = (ran.a.inverse == product.a.inverse, ran.b.inverse == product.b.inverse)
        if all(same) or (other[0] in kept and any(same)):
            return True
        if key[0] in kept and all(s for s, m in zip(same, moved, strict=True) if m):
            return True
    return False


_OTHER_SCALE = "recomputed with another scale"


def _differs(product: ProductSeen, want: ProductSeen | None) -> str:
    if want is None:
        return "recomputed what the forward did not do"
    for got, side in ((product.a, want.a), (product.b, want.b)):
        if got.format != side.format:
            return "recomputed in another precision"
    for got, side in ((product.a, want.a), (product.b, want.b)):
        if got.inverse != side.inverse:
            return _OTHER_SCALE
    for got, side in ((product.a, want.a), (product.b, want.b)):
        if got.codes is not None and not np.array_equal(got.codes, side.codes):  # type: ignore[arg-type]
            return "recomputed other codes"
    return ""


def _sides(product: ProductSeen) -> str:
    return " times ".join(_side(side) for side in (product.a, product.b))


def _side(side: Side) -> str:
    scale = "" if side.scale_inv is None else f" (1/scale {number(float(side.scale_inv))})"
    return f"{side.format}{scale}"


def check_precision(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """O20: inside a region every product runs in the recipe's formats, outside none does, and a
    forward that is told to casts its weights."""
    for arm, trace in evidence.traces.items():
        yield replace(_precision(evidence, trace), arm=arm)


_NARROW = frozenset({"e4m3", "e5m2"})


def _precision(evidence: LibraryEvidence, trace: Trace) -> Verdict:
    judged = False
    for (i, event, progress), moment in zip(steps_of(evidence.spec), trace.moments, strict=False):
        if isinstance(event, Forward):
            narrow = progress.inner(event) is not None
        elif isinstance(event, Backward):
            under = {f in progress.ran for f in event.of}
            if len(under) > 1:
                continue  # a sum over both kinds: which product belongs to which is not known
            narrow = under.pop()
        else:
            continue
        for product in moment.products:
            judged = True
            formats = {product.a.format, product.b.format}
            wrong = bool(formats - _NARROW) if narrow else bool(formats & _NARROW)
            symptom = "product in high precision" if narrow else "product in FP8"
            due = _formats(evidence, product) if narrow else set()
            if narrow and not wrong:
                symptom, wrong = "product in other FP8 formats", formats != due
            if wrong:
                symptom += f" ({product.at.phase}){circumstances(evidence.spec, trace.arm)}"
                return Verdict(
                    "O20", "", product.role, "diverged", symptom,
                    address_of(At(what="product", name=product.role), i, product.at),
                    _sides(product), Formats(tuple(sorted(due))),
                )  # fmt: skip
        missing = _weight_cast_missing(evidence, event, moment.casts) if narrow else ""
        if missing:
            return Verdict(
                "O20", "", "output", "diverged", missing,
                At(what="cast", event=i, name="output", side="b"),
                "none in the window the layer has", Present(("a fresh cast of the weight",)),
            )  # fmt: skip
    return plain("O20", "", "output", "ok" if judged else "not_applicable")


def _formats(evidence: LibraryEvidence, product: ProductSeen) -> set[str]:
    """What a product multiplies: one gradient in a backward, none elsewhere."""
    wide = evidence.kind != "mx" and evidence.spec.settings.format == "hybrid"
    return {"e5m2", "e4m3"} if wide and product.at.phase == "backward" else {"e4m3"}


def _weight_cast_missing(
    evidence: LibraryEvidence, event: object, casts: tuple[CastSeen, ...]
) -> str:
    known = any(c.slot is not None for c in casts)
    if not isinstance(event, Forward) or event.first is False or not known:
        return ""
    if evidence.spec.quantized_init:
        return ""
    forward = [c.slot for c in casts if c.at.phase == "forward"]
    if any(slot is not None and slot.index == 1 for slot in forward):
        return ""
    # scales of all tensors are state here: a cast that belongs to no slot feeds a state nobody has
    return "weight cast into a window that is gone" if None in forward else "weight not cast"


def check_twin(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """O12: checkpointed equals plain, in outputs, gradients and state after every event."""
    base = evidence.traces.get("eager")
    for arm, trace in evidence.traces.items():
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
        verdict = _same(evidence, "O12", arm, base, trace, range(until), PLAIN)
        if verdict.status == "diverged":
            runs = [replace(evidence, traces={t.arm: t}) for t in (base, trace)]
            verdict = blamed(verdict, *runs, alike=True)
        yield verdict


def _until(spec: Spec, trace: Trace, until: int) -> Trace:
    """The trace before event ``until``."""
    forwards = sum(isinstance(event, Forward) for event in spec.events[:until])
    outputs = {
        name: x
        for name, x in trace.outputs.items()
        if (int(name.partition("@")[2]) < until if "@" in name else int(name[1:]) < forwards)
    }
    return replace(trace, moments=trace.moments[:until], outputs=outputs)


#: Runs as addresses call them: the schedule where nothing is recomputed, where nothing reloads, of
#: the first model of a process, and of a later one.
PLAIN, THROUGH, ALONE = "without it", "uninterrupted", "alone in its process"
AFTER_OTHERS = "after other models"


def check_company(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """O1: a model behaves alike alone and after others of this process."""
    if evidence.company is None:
        yield plain("O1", "eager", "output", "not_applicable")
        return
    after = evidence.company()
    if after.error is not None:
        whole = replace(after.error, event=len(evidence.spec.events))  # all of it ran before
        symptom = f"{after.error.type} after other models{_circumstances(evidence.spec, whole)}"
        at = At(what="error", event=after.error.event, name=after.error.where, run=AFTER_OTHERS)
        yield Verdict(
            "O1", after.arm, "schedule", "diverged", symptom, at, after.error.message[:200],
            Runs(after.error.type),
        )  # fmt: skip
        return
    base, moments = evidence.traces[after.arm], range(len(after.moments))
    verdict = _same(evidence, "O1", after.arm, base, after, moments, ALONE)
    symptom = verdict.symptom
    if symptom and evidence.spec.quantized_init:
        symptom += ", FP8 parameters"
    if symptom and by_library(after.arm):
        symptom += unfinished(evidence.spec)
    yield replace(verdict, symptom=symptom)


def check_reload(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """R20: save, load, go on equals going on."""
    base = evidence.traces.get("eager")
    events = evidence.spec.events
    kept = [i for i, event in enumerate(events) if not isinstance(event, Reload)]
    if base is None or base.error is not None or evidence.run is None or len(kept) == len(events):
        yield plain("R20", "eager", "output", "not_applicable")
        return
    through = through_reloads(evidence.spec)
    uninterrupted = evidence.run(through)
    if uninterrupted.error is not None:
        yield plain("R20", "eager", "output", "inconclusive", "the run without it failed")
        return
    moments = _run_since_reload(events, base.moments)
    reloaded = replace(base, moments=tuple(moments[i] for i in kept))
    whole = replace(uninterrupted, moments=tuple(uninterrupted.moments[i] for i in kept))
    verdict = _same(evidence, "R20", "eager", whole, reloaded, kept, THROUGH)
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


def _same(
    evidence: LibraryEvidence,
    oracle: str,
    arm: str,
    base: Trace,
    other: Trace,
    events: Iterable[int],
    than: str,
) -> Verdict:
    """Bit for bit the same state after every event, outputs and gradients."""
    for i, a, b in zip(events, base.moments, other.moments, strict=False):
        for slot in sorted(a.state.keys() & b.state.keys()):
            if not a.state[slot].equals(b.state[slot]):
                at = slot.at(i)
                return Verdict(
                    oracle, arm, "state", "diverged", f"{slot.direction} state", at,
                    differing(b.state[slot], a.state[slot]),
                    Same(msgspec.structs.replace(at, run=than), described(a.state[slot])),
                )  # fmt: skip
    for name in base.outputs:
        got = other.outputs.get(name)
        if got is None or not _same_bits(base.outputs[name], got):
            kind = "gradient" if "grad" in name else "output"
            return Verdict(
                oracle, arm, kind, "diverged", kind, At(name=name),
                "none" if got is None else _furthest(base.outputs[name], got),
                Same(At(name=name, run=than)),
            )  # fmt: skip
    return plain(oracle, arm, "output", "ok")


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


def check_balance(evidence: LibraryEvidence) -> Iterator[Verdict]:
    """O19: at the end of a step nothing is set aside any more."""
    for arm, trace in evidence.traces.items():
        found = plain("O19", arm, "state", "not_applicable")
        for (i, event, progress), moment in zip(
            steps_of(evidence.spec), trace.moments, strict=False
        ):
            if not isinstance(event, Step) or progress.open:
                continue
            left = {name: n for name, n in moment.pending.items() if n}
            if left:
                symptom = f"left over: {', '.join(sorted(left))}{unfinished(evidence.spec)}"
                symptom += circumstances(evidence.spec, arm)
                at = At(what="pending", event=i)
                due = Is(bits(0))
                found = Verdict("O19", arm, "state", "diverged", symptom, at, str(left), due)
                break
            found = plain("O19", arm, "state", "ok")
        yield found
