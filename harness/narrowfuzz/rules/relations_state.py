"""Relations of state: what a step, a saved file, a bias or a microbatch may not change (R18-R20,
R23)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32, FORMATS, Format, round_to
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.rules.evidence import BY_CHANCE, Evidence
from narrowfuzz.rules.gemm import on_lattice
from narrowfuzz.rules.rerun import again, base_of, compare
from narrowfuzz.rules.rule import diverged, plain, same_bits
from narrowfuzz.rules.variant import Variant, bias_may_fuse, everything, judge_against
from narrowfuzz.rules.whole import equal_outputs
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Given, Is, Runs, Same, Sum, bits
from narrowfuzz.trace.meaning import shortened
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import OtherRun, Verdict


def check_steps(evidence: Evidence) -> Iterator[Verdict]:
    """R18: steps of an optimiser with lr = 0 change no operand and no result."""
    base = base_of(evidence)
    if base is None or not all(np.isfinite(x).all() for x in base.outputs.values()):
        yield plain("R18", evidence.base, "output", "not_applicable", "0 times a gradient is not 0")
        return
    yield from _same_after(evidence, "R18", "steps", "cannot go on")


def check_reload(evidence: Evidence) -> Iterator[Verdict]:
    """R20: a fresh layer that loads the saved state gives the same bits. A file that torch.load's
    default refuses is one divergence; its content is judged all the same."""
    if base_of(evidence) is None:
        yield plain("R20", evidence.base, "output", "not_applicable")
        return
    if why := other_layout(evidence.spec):
        yield plain("R20", evidence.base, "output", "not_applicable", why)
        return
    verdicts = list(_same_after(evidence, "R20", "reload", "cannot be loaded"))
    yield from verdicts
    if [v.role for v in verdicts] == ["state"]:
        yield from _same_after(evidence, "R20", "reload_trusted", "cannot be restored")


def other_layout(spec: Spec) -> str:
    """Why a new model that loads the state has its weights in another memory layout, for which
    kernels may add up in another order; "" if it has not."""
    copied = spec.lifecycle == "deepcopy" and spec.weight_layout == "strided"
    return "a deep copy has dense weights, the model that is built anew strided ones" * copied


def _same_after(evidence: Evidence, name: str, event: str, failure: str) -> Iterator[Verdict]:
    """Runs the same data after an event: nothing may raise, and every bit must be the same."""
    assert evidence.rerun is not None
    other = OtherRun(f"after {event.replace('_', ' ')}", evidence.spec, evidence.tensors, event)
    after = evidence.rerun(evidence.tensors, evidence.spec, event)
    if after.error is not None:
        error = after.error
        at = At(what="error", run=other.name, name=error.where)
        got, reported = (f"{error.type}: {say(error.message)}" for say in (_first_line, telling))
        symptom, more = f"{failure} ({error.type})", {"runs": (other,), "reported": reported}
        yield diverged(name, evidence.base, "state", symptom, at, got, Runs(error.type), **more)
        return
    variant = Variant(other, everything(evidence.spec), strict=ROLES)
    yield from judge_against(evidence, name, variant, after)


_NAMES = re.compile(r"\w+ error: (?P<what>.+?)(?:\. |\n|$)")


def telling(message: str) -> str:
    """The first sentence of a message that names what is wrong, if there is one, else the first
    line."""
    found = _NAMES.search(message)
    return " ".join(found["what"].split()) if found else _first_line(message)


def _first_line(message: str) -> str:
    """The first line, shortened, without the control characters that some errors have."""
    line = (message.strip() or "(no message)").splitlines()[0]
    return shortened("".join(c for c in line if c.isprintable()), 120)


def check_bias(evidence: Evidence) -> Iterator[Verdict]:
    """R19: layer(x) + b is the layer with bias b, and no gradient depends on b."""
    base, bias = base_of(evidence), evidence.tensors.get("bias")
    if base is None or bias is None:
        yield plain("R19", evidence.base, "output", "not_applicable", "no bias")
        return
    tensors = {name: x for name, x in evidence.tensors.items() if name != "bias"}
    spec = msgspec.structs.replace(evidence.spec, bias=False)
    other = OtherRun("without its bias", spec, tensors)
    after = again(evidence, other)
    if after is None:
        yield plain("R19", evidence.base, "output", "inconclusive", "the rerun failed")
        return
    yield _added(evidence, other, base.outputs["output"], after.outputs["output"], bias)
    for role in ("grad_input", "grad_weight"):
        if evidence.plan.gemms[role].stochastic:
            yield plain("R19", evidence.base, role, "not_applicable", BY_CHANCE)
            continue
        got, want = after.outputs[role], base.outputs[role]
        yield compare(evidence, "R19", role, got, want, "depends on the bias", other)


def check_microbatches(evidence: Evidence) -> Iterator[Verdict]:
    """R23: a parameter's gradient after several backwards is the sum of the gradients that each
    microbatch gives by itself, added one by one in the parameter's dtype, as autograd does."""
    eager, spec = evidence.traces.get(evidence.base), evidence.spec
    why = _why_not_added(evidence)
    if eager is None or eager.error is not None or why:
        yield plain("R23", evidence.base, "grad_parameter", "not_applicable", why)
        return
    total: dict[str, F32] = {}
    dtypes = MODELS[spec.model].gradients.dtypes
    others = [_alone(evidence, turn) for turn in range(spec.microbatches)]
    for turn, other in enumerate(others):
        part = _gradients(evidence, other)
        if part is None:
            yield plain("R23", evidence.base, "grad_parameter", "inconclusive", "the rerun failed")
            return
        for name, grad in part.items():
            dtype = dtypes.get(name.removesuffix(".grad"), spec.dtype)
            if dtype:
                with np.errstate(all="ignore"):
                    summed = _rounded(total[name] + grad, FORMATS[dtype]) if turn else grad
                total[name] = summed
    results = {name: eager.outputs[name] for name in total if name in eager.outputs}
    symptom = "is not the sum of the microbatches'"
    verdict = equal_outputs(
        "R23",
        evidence,
        Trace(evidence.base, results),
        Trace(evidence.base, total),
        symptom,
        "one by one",
    )
    if isinstance(verdict.expect, Same):
        total_of = Sum("the microbatches' gradients", verdict.expect.value)
        verdict = replace(verdict, expect=total_of, runs=tuple(others))
    yield verdict


def _alone(evidence: Evidence, turn: int) -> OtherRun:
    """The run of one microbatch by itself."""
    spec = msgspec.structs.replace(evidence.spec, microbatches=1)
    tensors = evidence.tensors | {"input": np.roll(evidence.tensors["input"], turn, axis=0)}
    called = {spec.parameters.get(name, name): x for name, x in tensors.items()}
    return OtherRun(f"microbatch {turn} alone", spec, called)


def _gradients(evidence: Evidence, other: OtherRun) -> dict[str, F32] | None:
    """The parameters' gradients of a run; None if it fails."""
    assert evidence.rerun is not None
    after = evidence.rerun(dict(other.tensors), other.spec, "")
    if after.error is not None:
        return None
    called = {own: name for name, own in other.spec.gradients.items()}
    results = ((called.get(name, name), x) for name, x in after.outputs.items())
    return {name: x for name, x in results if name.endswith(".grad")}


def _why_not_added(evidence: Evidence) -> str:
    spec = evidence.spec
    if spec.microbatches == 1 or spec.steps > 1 or not spec.trains:
        return "not several microbatches of one step"
    if MODELS[spec.model].remembers:
        return "what a forward computes depends on the forwards before it"
    if MODELS[spec.model].gradients.hooked:
        return "hooks of the model's own change gradients"
    return "a random model draws anew for each" if evidence.twin is None else ""


def _rounded(x: F32, fmt: Format) -> F32:
    """An fp32 result stored in the format."""
    return round_to(x.astype(np.float64), fmt, overflow="ieee").astype(np.float32)


def _added(evidence: Evidence, other: OtherRun, got: F32, without: F32, bias: F32) -> Verdict:
    if bias_may_fuse(evidence, "output") and not _sum_is_exact(evidence, bias):
        return plain("R19", evidence.base, "output", "not_applicable", "the bias may be fused")
    fmt = FORMATS[evidence.spec.dtype]
    with np.errstate(all="ignore"):
        want = _rounded(without + bias, fmt)  # the addition itself is fp32, whatever the output
    verdict = compare(evidence, "R19", "output", got, want, "is not the sum with its bias", other)
    if verdict.status == "ok" and same_bits(want, np.broadcast_to(bias, want.shape)).all():
        return plain("R19", evidence.base, "output", "inconclusive", "the sum equals the bias")
    ignored = "bias_ignored" in evidence.deviations and same_bits(got, without).all()
    if verdict.status == "diverged" and ignored:
        return plain("R19", evidence.base, "output", "ok").known(
            evidence.deviations["bias_ignored"]
        )
    if verdict.status != "diverged":
        return verdict
    at = verdict.at.index
    reported = Given("the result without a bias", verdict.at, bits(without[at]))
    own = msgspec.structs.replace(verdict.at, run="")
    return replace(verdict, at=own, expect=Is(bits(want[at])), given=(reported,))


def _sum_is_exact(evidence: Evidence, bias: F32) -> bool:
    """True on the lattice, in fp32, if the bias is on it, too: nothing is rounded, fused or not."""
    if evidence.spec.dtype != "fp32" or not np.isfinite(bias).all():
        return False
    exponent = evidence.case.data.input_exponent + evidence.case.data.weight_exponent
    units = np.ldexp(bias.astype(np.float64), -exponent)
    whole = bool((units == np.rint(units)).all())
    return whole and on_lattice(evidence, "output", addend=float(np.max(np.abs(bias), initial=0.0)))
