"""A perturbation falsifies one kind of observation of one arm, all scales for example, in every
layer and role at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.formats import F32, FORMATS, Format
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.power.falsify import Numbers, Operands
from narrowfuzz.rules.datum import Datum
from narrowfuzz.rules.evidence import Evidence, Rerun
from narrowfuzz.trace.trace import (
    AttentionCall,
    Change,
    LayerCall,
    Multiplied,
    RunError,
    Seen,
    SiteTrace,
    Trace,
)

#: What an arm left, falsified; None where it left nothing of the kind.
Falsified = Callable[[Trace, Plan], Trace | None]


@dataclass(frozen=True)
class Perturbation:
    """``change`` makes the evidence with one arm's observations falsified, and nothing else; None
    where there is nothing to falsify. What is expected of the arm is never touched."""

    name: str
    #: What of an arm it falsifies.
    of: str
    change: Callable[[Any, str], Any]

    @property
    def title(self) -> str:
        return f"{self.name} ({self.of})"


def of_trace(name: str, of: str, falsified: Falsified) -> Perturbation:
    """One that falsifies the arm's own run."""

    def change(evidence: Evidence, arm: str) -> Evidence | None:
        trace = falsified(evidence.traces[arm], evidence.plan)
        if trace is None:
            return None
        # the other arms' verdicts do not matter, but what this one is compared with does
        others = (arm, BY_NAME[arm].stage, EAGER.name, evidence.base)
        kept = {a: t for a, t in evidence.traces.items() if a in others}
        return _with(evidence, replace(evidence, traces=kept | {arm: trace}))

    return Perturbation(name, of, change)


def of_rerun(name: str, of: str, falsified: Falsified) -> Perturbation:
    """One that falsifies every run that a relation makes for itself."""

    def change(evidence: Evidence, arm: str) -> Evidence | None:
        real = evidence.rerun
        if real is None:
            return None

        def rerun(tensors: dict[str, F32], spec: Spec, event: str) -> Trace:
            trace = real(tensors, spec, event)
            return falsified(trace, evidence.plan) or trace

        return _with(evidence, replace(evidence, rerun=rerun))

    return Perturbation(name, of, change)


def of_datum(numbers: Numbers, datum: Datum[Any]) -> Perturbation:
    """One that falsifies what one rule alone reads."""

    def change(evidence: Evidence, arm: str) -> Evidence | None:
        found = evidence.datum(datum) if arm == evidence.base else None
        other = None if found is None else datum.falsified(found, numbers.change)
        if other is None:
            return None
        return _with(evidence, replace(evidence, data={**evidence.data, datum: lambda: other}))

    return Perturbation(numbers.name, datum.name, change)


def _with(evidence: Evidence, other: Evidence) -> Evidence:
    """The reference does not depend on what was observed: it is made once."""
    made = vars(evidence)
    vars(other).update({name: made[name] for name in ("reference", "exact") if name in made})
    return other


def once_each(evidence: Evidence) -> Evidence:
    """The same, whose further runs are made once and kept: perturbed checks ask for them again."""
    rerun, own = evidence.rerun, evidence.library
    if own is not None:
        own = replace(
            own,
            after_others=own.after_others and cache(own.after_others),
            alone=own.alone and cache(own.alone),
            run=own.run and cache(own.run),
        )
    return replace(evidence, rerun=rerun and _remembering(rerun), library=own)


def _remembering(rerun: Rerun) -> Rerun:
    """Runs each set of tensors once, and keeps the trace."""
    kept: dict[tuple[bytes, str, tuple[tuple[str, bytes], ...]], Trace] = {}

    def remembered(tensors: dict[str, F32], spec: Spec, event: str) -> Trace:
        data = tuple((name, x.tobytes()) for name, x in sorted(tensors.items()))
        key = (msgspec.json.encode(spec), event, data)
        if key not in kept:
            kept[key] = rerun(tensors, spec, event)
        return kept[key]

    return remembered


def outputs(
    numbers: Numbers, trace: Trace, plan: Plan, *, names: tuple[str, ...] = ()
) -> Trace | None:
    """Results, those of these names if any is given, and what a graph's multiplies returned."""
    chosen = {n: x for n, x in trace.outputs.items() if not names or n in names}
    if trace.error is not None or not (chosen or trace.multiplied):
        return None
    return replace(
        trace,
        outputs={**trace.outputs, **_each(numbers, chosen)},
        multiplied=tuple(replace(m, result=numbers.change(m.result)) for m in trace.multiplied),
    )


def _each(numbers: Numbers, arrays: Mapping[str, F32]) -> dict[str, F32]:
    return {name: numbers.change(x) for name, x in arrays.items()}


def operands(kind: Operands, trace: Trace, plan: Plan) -> Trace | None:
    """What each GEMM's main site showed, and the weights of a graph's multiplies."""
    sites = tuple(_site(s, plan, kind, "ab") for s in trace.sites)
    multiplied = tuple(_multiplied(m, kind, "b") for m in trace.multiplied)
    return _changed(trace, sites=sites, multiplied=multiplied)


def second_copies(kind: Operands, trace: Trace, plan: Plan) -> Trace | None:
    """The copies of the three tensors that are quantised for a second GEMM."""
    sides = {"grad_weight": "ab", "grad_input": "b"}
    sites = tuple(_site(s, plan, kind, sides.get(s.site.role, "")) for s in trace.sites)
    return _changed(trace, sites=sites)


def recomputed(kind: Operands, trace: Trace, plan: Plan) -> Trace | None:
    """What a recompute multiplied; a graph's is known by its weight, so its input is falsified."""
    return _changed(
        trace,
        sites=tuple(
            _site(s, plan, kind, "ab" if s.site.phase == "recompute" else "") for s in trace.sites
        ),
        calls=tuple(_call(call, plan, kind) for call in trace.calls),
        multiplied=tuple(
            _multiplied(m, kind, "a") if m.phase == "backward" else m for m in trace.multiplied
        ),
    )


def _call(call: LayerCall, plan: Plan, kind: Operands) -> LayerCall:
    if call.phase != "recompute":
        return call
    sites = tuple(_site(s, plan, kind, "ab") for s in call.sites)
    return call if _same(sites, call.sites) else replace(call, sites=sites)


def _multiplied(m: Multiplied, kind: Operands, side: str) -> Multiplied:
    before = m.a if side == "a" else m.b
    seen = _seen(before, None, kind)
    if seen is before:
        return m
    return replace(m, a=seen) if side == "a" else replace(m, b=seen)


def recomputed_tensors(numbers: Numbers, trace: Trace, plan: Plan) -> Trace | None:
    """What a recomputed layer got."""
    calls = (
        replace(one, tensors=_each(numbers, one.tensors)) if one.phase == "recompute" else one
        for one in trace.calls
    )
    return _changed(trace, calls=tuple(calls))


def statistics(numbers: Numbers, trace: Trace, plan: Plan, *, name: str) -> Trace | None:
    """What attention's backward got back of its forward."""

    def false(call: AttentionCall) -> dict[str, Any]:
        return {name: numbers.change(getattr(call, name))}

    calls = (
        replace(one, **false(one)) if one.phase == "backward" else one for one in trace.attention
    )
    return _changed(trace, attention=tuple(calls))


def operators(numbers: Numbers, trace: Trace, plan: Plan) -> Trace | None:
    """What calls of operators returned."""
    calls = (replace(one, outputs=_each(numbers, one.outputs)) for one in trace.operators)
    return _changed(trace, operators=tuple(calls))


def raised(trace: Trace, plan: Plan) -> Trace | None:
    """A run that did not end."""
    if trace.error is not None:
        return None
    error = RunError("backward", "RuntimeError", "not the library's words", "elsewhere.f", "")
    return Trace(trace.arm, error=error)


def mute(trace: Trace, plan: Plan) -> Trace | None:
    """A refusal that says nothing."""
    return None if trace.error is None else replace(trace, error=replace(trace.error, message=""))


def changed_unasked(trace: Trace, plan: Plan) -> Trace | None:
    """A conversion that changed one thing more."""
    if trace.census is None:
        return None
    change = Change("own forward lost", "proj", "its own", "nn.Module's")
    return replace(trace, census=replace(trace.census, changes=(*trace.census.changes, change)))


def without_output(trace: Trace, plan: Plan) -> Trace | None:
    """A result that did not come."""
    if "output" not in trace.outputs:
        return None
    return replace(trace, outputs={n: x for n, x in trace.outputs.items() if n != "output"})


def _site(site: SiteTrace, plan: Plan, kind: Operands, sides: str) -> SiteTrace:
    gemm = plan.gemms[site.site.role]
    a = _seen(site.a, gemm.a.format, kind) if "a" in sides else site.a
    b = _seen(site.b, gemm.b.format, kind) if "b" in sides else site.b
    return site if a is site.a and b is site.b else replace(site, a=a, b=b)


def _seen(seen: Seen, fmt: Format | None, kind: Operands) -> Seen:
    return kind.change(seen, FORMATS[seen.format] if seen.format else fmt) or seen


def _changed(trace: Trace, **parts: Any) -> Trace | None:
    """The trace with these parts, None if every item of them is the one it had."""
    if all(_same(new, getattr(trace, name)) for name, new in parts.items()):
        return None
    return replace(trace, **parts)


def _same(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(x, y, strict=True))
