"""O12 checkpoint-equal, O13 recompute-consistency, O18 saved-statistics.

What backward recomputes must equal what forward computed, and what forward saved (attention's
output and log-sum-exp) must belong to that forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from narrowfuzz.case.events import Forward, Step
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.accumulator import UNKNOWN, Accumulator
from narrowfuzz.numerics.formats import F32, FORMATS, canonical
from narrowfuzz.operators.attention_statistics import softmax_excess
from narrowfuzz.rules.evidence import Evidence, same_bits
from narrowfuzz.rules.rule import diverged, first, number, plain
from narrowfuzz.rules.whole import equal_outputs, not_passed
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Own, Same, bits
from narrowfuzz.trace.trace import AttentionCall, LayerCall, Multiplied, Seen, Trace, repeated
from narrowfuzz.trace.verdict import Status, Verdict

#: By how many roundings of its largest number a gradient may differ whose sums come in another
#: order, and were rounded again on the way through the blocks before.
_ROUNDINGS = 64


def check_checkpoint(evidence: Evidence) -> Iterator[Verdict]:
    """O12: in eager, a checkpointed run equals the plain one bit for bit."""
    for arm, trace in evidence.traces.items():
        arm_options = BY_NAME[arm]
        if not arm_options.recomputes or arm_options.compiled:
            continue
        base = evidence.traces.get(arm_options.stage)
        if base is None or base.error is not None or trace.error is not None:
            yield plain("O12", arm, "output", "not_applicable")
            continue
        if arm_options.checkpoint == "reentrant" and evidence.spec.sums_forwards:
            # a reentrant checkpoint runs a separate backward for each of them
            why = "gradients of several forwards are added in another order"
            yield plain("O12", arm, "output", "not_applicable", why)
            continue
        reordered = _sums_otherwise(evidence, arm)
        steps = any(isinstance(event, Step) for event in evidence.spec.training)
        near = reordered and MODELS[evidence.spec.model].own and not steps
        names = _before_a_step(evidence.spec) if reordered and not near else None
        if gone := not_passed(evidence, arm) - trace.outputs.keys():
            found = {n: x for n, x in base.outputs.items() if n not in gone}
            base = dataclasses.replace(base, outputs=found)
        verdict = equal_outputs(
            "O12", evidence, trace, base, "differs from no checkpoint", arm_options.stage, names
        )
        if near and verdict.status == "diverged" and _near(evidence.spec, trace, base):
            why = "within the rounding of gradients that are added in another order"
            verdict = plain("O12", arm, verdict.role, "inconclusive", why)
        yield verdict


def _near(spec: Spec, trace: Trace, base: Trace) -> bool:
    """Do all results differ by no more than a few roundings of their largest number?"""
    most = _ROUNDINGS * FORMATS[spec.dtype].unit_roundoff
    return base.outputs.keys() == trace.outputs.keys() and all(
        _within(most, trace.outputs[name], plain) for name, plain in base.outputs.items()
    )


def _within(most: float, x: F32, plain: F32) -> bool:
    """True if no number is off by more than this share of the largest finite one of ``plain``, and
    those that are not finite are the same."""
    finite = np.isfinite(plain)
    if x.shape != plain.shape or not same_bits(x[~finite], plain[~finite]).all():
        return False
    largest = np.abs(plain[finite]).max(initial=0.0)
    with np.errstate(all="ignore"):
        return bool((np.abs(x - plain)[finite] <= most * largest).all())


def _before_a_step(spec: Spec) -> frozenset[str]:
    """Names of the outputs before the first step, which no gradient has influenced."""
    forwards = [i for i, event in enumerate(spec.training) if isinstance(event, Forward)]
    steps = [i for i, event in enumerate(spec.training) if isinstance(event, Step)]
    before = [n for n, i in enumerate(forwards) if not steps or i < steps[0]]
    last = len(forwards) - 1
    return frozenset("output" if n == last else f"output@{n}" for n in before)


def _sums_otherwise(evidence: Evidence, arm: str) -> bool:
    """May this checkpoint legally add a gradient's sums in another order?

    A reentrant checkpoint runs its region on a detached input, and autograd stores the gradient of
    such a leaf with the leaf's strides (torch/csrc/autograd/functions/accumulate_grad.h); without a
    checkpoint the gradient has the strides that backward made. So with a transposed input, or with
    transposed gradients of the output, the preceding region gets its gradient in another layout, on
    which a kernel's order of sums depends.
    The same holds for blocks of a user's model that are all given one tensor: its gradients come
    region by region, where without a checkpoint they come as autograd orders the graph.
    """
    spec = evidence.spec
    return (
        BY_NAME[arm].checkpoint == "reentrant"
        and len(evidence.regions) > 1
        and ("transposed" in (spec.input_layout, spec.grad_layout) or MODELS[spec.model].own)
    )


def check_recompute(evidence: Evidence) -> Iterator[Verdict]:
    """O13: a recomputed GEMM multiplies the same operands as the GEMM of the forward."""
    for arm, trace in evidence.traces.items():
        if not BY_NAME[arm].recomputes:
            continue
        if trace.error is not None or not evidence.spec.trains:
            yield plain("O13", arm, "output", "not_applicable")
        elif evidence.compiled(arm):
            yield _compiled(arm, trace)
        elif not evidence.plan.quantised and not trace.calls:
            yield plain("O13", arm, "output", "not_applicable", "nothing is quantised")
        else:
            yield from _eager(evidence, arm, trace)


def _eager(evidence: Evidence, arm: str, trace: Trace) -> Iterator[Verdict]:
    matched, pairs = [*repeated(trace.calls, same_input)], []
    for f, r in matched:
        if r.checkpointed or same_input(f, r):
            pairs.append(((f.module, f.index, r.index), f.sites, r.sites, f.tensors, r.tensors))
        else:  # as in reversible layers, which compute their input from their output
            anew = plain("O13", arm, "output", "inconclusive", "the model computes its input again")
            yield replace(anew, at=At(layer=f.module))
    if not trace.calls:
        forward, again = trace.at("output", "forward"), trace.at("output", "recompute")
        if forward is None or again is None:
            reused = forward is not None
            status: Status = "not_applicable" if reused else "inconclusive"
            why = "its product was saved" if reused else trace.unobserved or "not tapped"
            yield plain("O13", arm, "output", status, why)
            return
        pairs = [(_ALONE, (forward,), (again,), {}, {})]
    if not pairs and not matched:
        yield plain("O13", arm, "output", "inconclusive", "no call was recomputed")
    for place, sites, again_sites, tensors, again_tensors in pairs:
        handed = {
            name: _same(arm, place, name, tensors[name], again_tensors[name])
            for name in ("input", "weight")
            if name in tensors
        }
        for name, verdict in handed.items():
            nothing = verdict.status == "ok" and not _says(tensors[name])
            yield plain("O13", arm, "output", "inconclusive", _NOTHING) if nothing else verdict
        moved = any(verdict.status != "ok" for verdict in handed.values())
        if moved or not sites or not again_sites:
            continue  # its arguments differ, or its product was saved instead of recomputed
        for side in ("a", "b"):
            x, y = getattr(sites[0], side), getattr(again_sites[0], side)
            yield _same_seen(arm, place, side, x, y)


def same_input(one: LayerCall, other: LayerCall) -> bool:
    """Did two calls of a layer get the same input, bit for bit?"""
    x, y = one.tensors.get("input"), other.tensors.get("input")
    if x is None or y is None or x.shape != y.shape:
        return False
    return bool(same_bits(x, y).all())


#: A layer, the number of its forward call, and the number of its recompute.
_Place = tuple[str, int, int]
_ALONE: _Place = ("", 0, 0)


def _same_seen(arm: str, place: _Place, side: str, x: Seen, y: Seen) -> Verdict:
    for what, before, after in _parts(x, y):
        if before is not None and after is not None:
            verdict = _same(arm, place, what, before, after, side)
            if verdict.status != "ok":
                return verdict
    if x.values is not None and not _says(x.values):
        return plain("O13", arm, "output", "inconclusive", _NOTHING)
    return _ok(arm, place)


def _ok(arm: str, place: _Place) -> Verdict:
    return replace(plain("O13", arm, "output", "ok"), at=At(layer=place[0]))


_NOTHING = "nothing but zeros and NaN"


def _says(x: Any) -> bool:
    """Does it hold anything but zeros and NaN, which prove nothing: another tensor may hold them,
    too?"""
    return bool(((x != 0) & (x == x)).any())


def _parts(x: Seen, y: Seen) -> tuple[tuple[str, Any, Any], ...]:
    """The arrays by which two observations of an operand are compared: (name, first, second). Codes
    are made canonical, since a NaN's sign means nothing."""
    return (
        ("scale", x.scale, y.scale),
        ("codes", _codes(x), _codes(y)),
        ("values", x.values, y.values),
    )


def _codes(seen: Seen) -> Any:
    if seen.codes is None or not seen.format:
        return seen.codes
    return canonical(seen.codes, FORMATS[seen.format])


def _same(arm: str, place: _Place, what: str, before: Any, after: Any, side: str = "") -> Verdict:
    same = before.shape == after.shape and before.dtype == after.dtype
    bad = ~same_bits(before, after) if same else None
    if bad is not None and not bad.any():
        return _ok(arm, place)
    at = first(bad) if bad is not None else ()
    named = what if what in ("scale", "codes") else "operands"
    # without a side it is an argument of the layer, an operand before it is quantised
    layer, call, recompute = place
    there = At(
        what=what if side else "source",  # type: ignore[arg-type]
        layer=layer,
        name="output" if side else what,
        call=recompute,
        phase="recompute",
        side=side,  # type: ignore[arg-type]
        index=at,
    )
    first_run = msgspec.structs.replace(there, phase="forward", call=call)
    symptom, expect = f"{named} differ in recompute", Same(first_run, str(before[at]))
    return diverged("O13", arm, "output", symptom, there, str(after[at]), expect)


def _compiled(arm: str, trace: Trace) -> Verdict:
    """A backward GEMM with a forward GEMM's weight operand is that GEMM, recomputed."""
    forward = [m for m in trace.multiplied if m.phase == "forward"]
    repeats = 0
    for again in (m for m in trace.multiplied if m.phase == "backward"):
        originals = [m for m in forward if _equal(m.b, again.b)]
        if not originals or _ambiguous(again.b, forward):  # it may be the input gradient's GEMM
            continue
        repeats += 1
        if not any(_equal(m.a, again.a) for m in originals):
            return _moved(arm, originals[0], again)
    if not repeats:
        return plain("O13", arm, "output", "not_applicable", "no GEMM was recomputed")
    return plain("O13", arm, "output", "ok")


def _equal(x: Seen, y: Seen) -> bool:
    for _, before, after in _parts(x, y):
        if (before is None) != (after is None):
            return False
        if before is not None and not (
            before.shape == after.shape and same_bits(before, after).all()  # type: ignore[union-attr]
        ):
            return False
    return True


def _ambiguous(seen: Seen, forward: Sequence[Multiplied]) -> bool:
    """True for a weight that another operand may equal: a forward multiplies by its transpose, or
    it holds a single value (zeros, or NaNs once training has diverged)."""
    array = _array(seen)
    turned = (_array(m.b) for m in forward)
    return bool(same_bits(array, array[:1, :1]).all()) or any(
        other.shape == array.T.shape
        and other.dtype == array.dtype
        and bool(same_bits(other, array.T).all())
        for other in turned
    )


def _array(seen: Seen) -> Any:
    """An operand's codes, or its values if it has none."""
    array = _codes(seen) if seen.codes is not None else seen.values
    assert array is not None
    return array


def _moved(arm: str, original: Multiplied, again: Multiplied) -> Verdict:
    verdict = _same_seen(arm, _ALONE, "a", original.a, again.a)
    assert verdict.status == "diverged"
    return verdict


def check_statistics(evidence: Evidence) -> Iterator[Verdict]:
    """O18: attention's backward gets the q, k, v of its forward, and statistics that fit them."""
    for arm, trace in evidence.traces.items():
        backward = [c for c in trace.attention if c.phase == "backward"]
        if not backward:
            yield plain("O18", arm, "output", "not_applicable", "no attention kernel in backward")
            continue
        forward = [c for c in trace.attention if c.phase == "forward"]
        for call in backward:
            adds = evidence.accumulators.get(f"attention {call.dtype}", UNKNOWN)
            yield _statistics(arm, call, forward, adds)


def _statistics(
    arm: str, call: AttentionCall, forward: list[AttentionCall], adds: Accumulator
) -> Verdict:
    """Compares the backward's tensors with those of the forward that has the same log-sum-exp, then
    checks that each row's probabilities sum to 1."""
    place = At(what="attention", phase="backward", layer=_caller(call, forward))
    own = Own("the forward's")
    alike = [f for f in forward if f.lse.shape == call.lse.shape and _same_array(f.lse, call.lse)]
    if not alike:
        actual = "statistics that no forward returned"
        return diverged("O18", arm, "output", "log-sum-exp of no forward", place, actual, own)
    if not any(_same_array(f.out, call.out) for f in alike):
        actual = "an output that does not belong to its log-sum-exp"
        return diverged("O18", arm, "output", "output of another forward", place, actual, own)
    for name in ("q", "k", "v"):
        got = getattr(call, name)
        if not any(_same_array(getattr(f, name), got) for f in alike):
            bad = ~same_bits(getattr(alike[0], name), got)
            at = first(bad)
            place = msgspec.structs.replace(place, name=name, index=at)
            actual = f"{number(got[at])} ({int(bad.sum())} of {bad.size} elements moved)"
            own, far = Own(number(getattr(alike[0], name)[at])), softmax_excess(call, adds).factor
            symptom = "attention's inputs moved after forward"
            return diverged("O18", arm, "output", symptom, place, actual, own, factor=far)
    if call.unknown:
        why = f"what the kernel's argument {call.unknown} does to the scores is not known"
        return plain("O18", arm, "output", "inconclusive", why)
    excess, allowed, swallowed = softmax_excess(call, adds)
    if allowed == 0.0:
        return plain("O18", arm, "output", "inconclusive", "no row's scores are certain enough")
    if excess > 1.0:
        symptom = f"probabilities do not sum to 1{' beside a large mask' * swallowed}"
        actual = f"a row that is off by {excess * allowed:.3g}"
        own = Own(f"1 within {allowed:.3g}", bits(allowed))
        return diverged("O18", arm, "output", symptom, place, actual, own, factor=excess)
    if not any(getattr(call, name).any() for name in ("q", "k", "v")):
        return plain("O18", arm, "output", "inconclusive", "attention of zeros shows nothing")
    return plain("O18", arm, "output", "ok")


def _caller(call: AttentionCall, forward: list[AttentionCall]) -> str:
    """The module that called the forward which shares most tensors with this backward; "" if none
    shares any."""

    def shared(one: AttentionCall) -> int:
        parts = ("q", "k", "v", "lse", "out")
        return sum(_same_array(getattr(one, name), getattr(call, name)) for name in parts)

    best = max(forward, key=shared, default=None)
    return best.module if best is not None and shared(best) else ""


def _same_array(x: Any, y: Any) -> bool:
    return bool(x.shape == y.shape and same_bits(x, y).all())
