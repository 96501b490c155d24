"""Perturbations: each falsifies one kind of observation of one arm (for example all scales) in
every layer and role at once. A rule whose verdict stays ``ok`` does not notice it."""

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

#: Falsifies an arm's trace; returns None if the trace has nothing of the kind.
Falsified = Callable[[Trace, Plan], Trace | None]


@dataclass(frozen=True)
class Perturbation:
    """``change(evidence, arm)`` returns the evidence with only this arm's observations falsified;
    None if there is nothing to falsify. What is expected of the arm is never changed."""

    name: str
    #: The kind of observation that it falsifies.
    of: str
    change: Callable[[Any, str], Any]

    @property
    def title(self) -> str:
        return f"{self.name} ({self.of})"


def of_trace(name: str, of: str, falsified: Falsified) -> Perturbation:
    """A perturbation that falsifies the arm's own run."""

    def change(evidence: Evidence, arm: str) -> Evidence | None:
        trace = falsified(evidence.traces[arm], evidence.plan)
        if trace is None:
            return None
        # verdicts on other arms do not matter: only arms that this one is compared with are needed
        others = (arm, BY_NAME[arm].stage, EAGER.name, evidence.base)
        other_traces = {a: t for a, t in evidence.traces.items() if a in others}
        return _with(evidence, replace(evidence, traces=other_traces | {arm: trace}))

    return Perturbation(name, of, change)


def of_rerun(name: str, of: str, falsified: Falsified) -> Perturbation:
    """A perturbation that falsifies every further run that a relation (a rule with ``reruns``)
    requests."""

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
    """A perturbation that falsifies data that only one rule reads."""

    def change(evidence: Evidence, arm: str) -> Evidence | None:
        found = evidence.datum(datum) if arm == evidence.base else None
        other = None if found is None else datum.falsified(found, numbers.change)
        if other is None:
            return None
        return _with(evidence, replace(evidence, data={**evidence.data, datum: lambda: other}))

    return Perturbation(numbers.name, datum.name, change)


def _with(evidence: Evidence, other: Evidence) -> Evidence:
    """Copy the references to the falsified evidence: they do not depend on observations, and so are
    computed only once."""
    made = vars(evidence)
    vars(other).update({name: made[name] for name in ("reference", "exact") if name in made})
    return other


def once_each(evidence: Evidence) -> Evidence:
    """The same evidence with its further runs cached, as perturbed checks request them again."""
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
    """A cached ``rerun``: it runs each combination of Spec, event and tensors once."""
    cached: dict[tuple[bytes, str, tuple[tuple[str, bytes], ...]], Trace] = {}

    def remembered(tensors: dict[str, F32], spec: Spec, event: str) -> Trace:
        data = tuple((name, x.tobytes()) for name, x in sorted(tensors.items()))
        key = (msgspec.json.encode(spec), event, data)
        if key not in cached:
            cached[key] = rerun(tensors, spec, event)
        return cached[key]

    return remembered


def outputs(
    numbers: Numbers, trace: Trace, plan: Plan, *, names: tuple[str, ...] = ()
) -> Trace | None:
    """Falsify results (only those in ``names``, if given), and those of a graph's multiplies."""
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
    """Falsify both operands at each site of a linear's GEMMs, and the weights of a graph's
    multiplies."""
    sites = tuple(_site(s, plan, kind, "ab") for s in trace.sites)
    multiplied = tuple(_multiplied(m, kind, "b") for m in trace.multiplied)
    return _changed(trace, sites=sites, multiplied=multiplied)


def second_copies(kind: Operands, trace: Trace, plan: Plan) -> Trace | None:
    """Falsify the copies of the input, weight and output gradient that are quantised for a second
    GEMM: both operands of the weight gradient, and the weight of the input gradient."""
    sides = {"grad_weight": "ab", "grad_input": "b"}
    sites = tuple(_site(s, plan, kind, sides.get(s.site.role, "")) for s in trace.sites)
    return _changed(trace, sites=sites)


def recomputed(kind: Operands, trace: Trace, plan: Plan) -> Trace | None:
    """Falsify the operands of a recompute. A graph's multiply is identified by its weight, so there
    only the input is falsified."""
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
    """Falsify the tensors that recomputed layers received."""
    calls = (
        replace(one, tensors=_each(numbers, one.tensors)) if one.phase == "recompute" else one
        for one in trace.calls
    )
    return _changed(trace, calls=tuple(calls))


def statistics(numbers: Numbers, trace: Trace, plan: Plan, *, name: str) -> Trace | None:
    """Falsify one tensor (``name``) that attention's backward received from its forward."""

    def false(call: AttentionCall) -> dict[str, Any]:
        return {name: numbers.change(getattr(call, name))}

    calls = (
        replace(one, **false(one)) if one.phase == "backward" else one for one in trace.attention
    )
    return _changed(trace, attention=tuple(calls))


def operators(numbers: Numbers, trace: Trace, plan: Plan) -> Trace | None:
    """Falsify the results of operator calls."""
    calls = (replace(one, outputs=_each(numbers, one.outputs)) for one in trace.operators)
    return _changed(trace, operators=tuple(calls))


def raised(trace: Trace, plan: Plan) -> Trace | None:
    """Replace the run with one that raised."""
    if trace.error is not None:
        return None
    error = RunError("backward", "RuntimeError", "not the library's words", "elsewhere.f")
    return Trace(trace.arm, error=error)


def mute(trace: Trace, plan: Plan) -> Trace | None:
    """Remove the message of a refusal."""
    return None if trace.error is None else replace(trace, error=replace(trace.error, message=""))


def changed_unasked(trace: Trace, plan: Plan) -> Trace | None:
    """Add a change to what the conversion changed."""
    if trace.census is None:
        return None
    change = Change("own forward lost", "proj", "its own", "nn.Module's")
    return replace(trace, census=replace(trace.census, changes=(*trace.census.changes, change)))


def without_output(trace: Trace, plan: Plan) -> Trace | None:
    """Remove the result ``output``."""
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
    """The trace with these parts replaced; None if every item of them is unchanged."""
    if all(_same(new, getattr(trace, name)) for name, new in parts.items()):
        return None
    return replace(trace, **parts)


def _same(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(x, y, strict=True))
