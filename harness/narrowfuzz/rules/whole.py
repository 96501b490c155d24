"""O8 strict-compile and O9 error-ratio: a compiled model, or one on PyTorch's own kernels, compared
with eager and with its float64 twin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from narrowfuzz.case.kind import kind_of
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import OPTIMIZERS, Spec
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.numerics.plan import ROLES
from narrowfuzz.operators import OPERATORS_OF
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import BY_CHANCE, EAGER, Evidence, identical, same_bits
from narrowfuzz.rules.gemm import on_lattice
from narrowfuzz.rules.operators import gives
from narrowfuzz.rules.rule import diverged, diverged_from, first, number, plain
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import FINITE, Near, Same, bits
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

#: The multiples of eager's error that torch's own tests allow: in fp32, in narrower dtypes, and for
#: results of fewer than ``SMALL`` elements.
_RATIO = {"fp32": 2.0, "bf16": 3.0, "fp16": 3.0}
SMALL, SMALL_RATIO = 1000, 10.0
#: torch's own absolute floor, here relative to the result.
_FLOOR = 1e-5
#: Relative error of eager beyond which the case amplifies errors so much that no ratio means
#: anything: 2^17 roundings of fp32, or half of a narrower or quantised result.
_LOST = {"fp32": 2.0**-7, "bf16": 0.5, "fp16": 0.5}


def check_strict(evidence: Evidence) -> Iterator[Verdict]:
    """O8: arms that keep every rounding of eager give eager's bits, if no float sum was re-ordered
    or all of them are exact."""
    eager = evidence.traces.get(EAGER)
    for arm, trace in evidence.traces.items():
        if not evidence.compared(arm):
            continue
        if eager is None or eager.error is not None or trace.error is not None:
            yield plain("O8", arm, "output", "not_applicable")
            continue
        why = _not_exact(evidence) if evidence.native(arm) else evidence.not_strict(arm)
        if why:
            yield plain("O8", arm, "output", "not_applicable", why)
            continue
        yield equal_outputs("O8", evidence, trace, eager, "differs from eager", "eager")


def _not_exact(evidence: Evidence) -> str:
    """Why another kernel may give other bits, or "" if it must give the same: if sums are exact,
    only the result is rounded."""
    roles = ROLES if evidence.spec.trains else ROLES[:1]
    if kind_of(evidence.spec).judges_each_linear or not all(
        on_lattice(evidence, role) for role in roles
    ):
        return "kernels sum in their own order"
    return "the bias may be fused" if evidence.spec.bias else ""


def not_passed(evidence: Evidence, arm: str) -> frozenset[str]:
    """The gradients of parameters outside of all blocks that a user's model, unconverted, does not
    get on an arm of a reentrant checkpoint, which passes none to tensors inside of lists."""
    if BY_NAME[arm].checkpoint != "reentrant" or evidence.lacking is None:
        return frozenset()
    blocks = tuple(f"{region}." for region in evidence.regions)
    return frozenset(n for n in evidence.lacking(arm) if blocks and not n.startswith(blocks))


def equal_outputs(
    rule: str,
    evidence: Evidence,
    trace: Trace,
    other: Trace,
    symptom: str,
    than: str,
    names: frozenset[str] | None = None,
) -> Verdict:
    """One verdict for a whole run: every result has the bits of the ``other`` run, which addresses
    call ``than``. With ``names`` only these results must; the rest must only exist in both runs.

    Gradients of modules whose calls a known issue of a kernel may make wrong come last: it would
    explain the difference that is found first, and hide those of all other modules."""
    arm = trace.arm
    if any(evidence.by_chance(role) for role in ROLES):
        return plain(rule, arm, "output", "not_applicable", BY_CHANCE)
    every = sorted(set(trace.outputs) | set(other.outputs), key=_rank)
    different = [name for name in every if _differs(trace, other, name, names)]
    if different:
        name = _least_excused(different, evidence)
        got, want = trace.outputs.get(name), other.outputs.get(name)
        at, there = At(name=name), At(name=name, run=than)
        if got is None or want is None:
            symptom, actual = "gradient missing in one run", "one run without it"
            return diverged(rule, arm, role_of(name), symptom, at, actual, Same(there))
        return diverged_from(rule, arm, role_of(name), symptom, at, there, got, want)
    if not any(x.any() for x in trace.outputs.values()):
        return plain(rule, arm, "output", "inconclusive", "zeros in both runs")
    return plain(rule, arm, "output", "ok")


def _differs(trace: Trace, other: Trace, name: str, names: frozenset[str] | None) -> bool:
    got, want = trace.outputs.get(name), other.outputs.get(name)
    if got is None or want is None:
        return True
    compared = names is None or name in names
    return compared and not identical(got, want) and not same_bits(got, want).all()


def _least_excused(names: Sequence[str], evidence: Evidence) -> str:
    """The first of these results, or of those of its kind one whose module no known issue affects,
    if there is any."""
    inexact = _of_known_kernels(evidence)
    return min(names, key=lambda name: (_rank(name)[:2], name_of(name).module in inexact))


def _of_known_kernels(evidence: Evidence) -> frozenset[str]:
    """Names of the modules that call operators of which a deviation is known here, or whose
    gradients such a call returns."""
    operators = frozenset[str]().union(*(OPERATORS_OF.get(d, ()) for d in evidence.deviations))
    calls = [
        (trace, call)
        for trace in evidence.traces.values()
        for call in trace.operators
        if call.operator in operators
    ]
    given = {gives(trace, got) for trace, call in calls for got in call.outputs.values()}
    return frozenset({call.module for _, call in calls} | given) - {""}


def _rank(name: str) -> tuple[int, float, str]:
    """Sort key for results in the order in which they are computed, the last of a kind (which has
    no number) behind the numbered ones: the first wrong result is the nearest to the cause."""
    parts = name_of(name)
    order = ("output", "grad_input").index(parts.kind) if parts.by_rows else 2
    return order, float(parts.number or np.inf), f"{parts.part}:{parts.kind}"


def role_of(name: str) -> str:
    """The role of a result: its kind, without the parameter's name, its number, and the part of a
    resumed training (which precedes a colon). Fingerprints identify causes, not layers."""
    clipped, name = name_of(name).clipped_of, name_of(name).kind
    if name.endswith((".exp_avg", ".exp_avg_sq", ".step")):
        return "state"
    if name in ("output", "grad_input", "grad_weight", "grad_bias", "norm", "loss_scale"):
        return name
    if clipped:
        return "clipped"
    if name.endswith(".buffer"):
        return "buffer"
    return "grad_parameter" if name.endswith(".grad") else "parameter"


def check_ratio(evidence: Evidence) -> Iterator[Verdict]:
    """O9: an arm's error against float64 is at most a small multiple of eager's.

    The root mean square error is judged for each result as a whole and row by row; errors below a
    floor, the cost of K roundings of the size of the result or of a larger row, do not count.
    Eager's error counts as at least the median error of results of the same role, since a few
    numbers may be right by luck. Where eager and float64 are finite, the arm must be, too.
    """
    eager = evidence.traces.get(EAGER)
    for arm, trace in evidence.traces.items():
        if not evidence.compared(arm):
            continue
        if eager is None or eager.error is not None or trace.error is not None:
            yield plain("O9", arm, "output", "not_applicable")
            continue
        if not kind_of(evidence.spec).judges_each_linear:
            yield plain("O9", arm, "output", "not_applicable", "bounds judge a single linear")
            continue
        if evidence.twin is None:
            yield plain("O9", arm, "output", "not_applicable", "a random model has no twin")
            continue
        yield error_ratio(evidence, arm, trace, eager)


def error_ratio(evidence: Evidence, arm: str, trace: Trace, eager: Trace) -> Verdict:
    """O9 for one run: its error compared with eager's."""
    judged, usual = False, _usual(evidence, eager)
    for name in sorted(evidence.exact, key=_rank):
        got, base = trace.outputs.get(name), eager.outputs.get(name)
        exact = evidence.exact[name]
        if got is None or base is None or not got.size:
            continue
        if not (np.isfinite(base).all() and np.isfinite(exact).all()):
            continue
        if _lost(evidence, base, exact):
            continue
        if _counts(name, base, exact):
            continue
        judged = True
        if not np.isfinite(got).all():
            at = At(name=name, index=first(~np.isfinite(got)))
            actual = number(got[at.index])
            return diverged("O9", arm, role_of(name), "not finite", at, actual, FINITE)
        if _normalised(evidence.spec, name):
            continue
        verdict = _worse(evidence.spec, arm, name, got, base, exact, usual[role_of(name)])
        if verdict is not None:
            return verdict
    if not judged:
        why = "eager is not finite, or far from float64 itself"
        if not evidence.exact:
            why = "the model does not run in float64"
        return plain("O9", arm, "output", "inconclusive", why)
    return plain("O9", arm, "output", "ok")


def _normalised(spec: Spec, name: str) -> bool:
    """Is it a parameter that was moved by Adam, or by another optimizer that divides a gradient by
    the gradient's size? If a gradient is rounding noise, its sign decides about a whole learning
    rate, in some elements of any arm. The gradient and the optimizer's state are judged."""
    return OPTIMIZERS[spec.optimizer][0] != "SGD" and role_of(name) == "parameter"


def _counts(name: str, base: Any, exact: Any) -> bool:
    """Is it a buffer of whole numbers, such as a router's counts of rows? A score that is rounded
    otherwise may send a row to another expert; no error of a sum says how many."""
    whole = (np.array_equal(x, np.trunc(x)) for x in (base, exact))
    return role_of(name) == "buffer" and all(whole)


def _usual(evidence: Evidence, eager: Trace) -> dict[str, float]:
    """Role -> eager's relative error: the lower median over all results of that role."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for name, exact in evidence.exact.items():
        base = eager.outputs.get(name)
        if base is not None and base.size and np.isfinite(error := _relative(base, exact)):
            errors[role_of(name)].append(error)
    middle = {role: sorted(each)[(len(each) - 1) // 2] for role, each in errors.items()}
    return defaultdict(float, middle)


def _relative(base: Any, exact: Any) -> float:
    """Root mean square of the error, in units of that of the exact result."""
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean((base - exact) ** 2)) / np.sqrt(np.mean(exact**2)))


def _lost(evidence: Evidence, base: Any, exact: Any) -> bool:
    """True if eager's own result is too inaccurate to compare with."""
    narrow = evidence.spec.narrowed or evidence.plan.quantised
    limit = _LOST["bf16" if narrow else evidence.spec.dtype]
    return not _relative(base, exact) < limit


def ratio_limit(spec: Spec) -> tuple[float, float]:
    """Multiple of eager's error that a large result may have, and the floor below which no error
    counts, in units of the exact result's root mean square."""
    dtype = "bf16" if spec.narrowed else spec.dtype
    contracted = max(spec.k, spec.n, spec.tokens)
    floor = contracted * FORMATS["fp32"].unit_roundoff + _FLOOR
    return _RATIO[dtype], floor + 2.0 * FORMATS[dtype].unit_roundoff


def _worse(
    spec: Spec, arm: str, name: str, got: Any, base: Any, exact: Any, usual: float
) -> Verdict | None:
    got, base, exact = map(np.atleast_1d, (got, base, exact))  # a parameter may be a single number
    large, rounding = ratio_limit(spec)
    whole = float(np.sqrt(np.mean(exact**2)))
    error, allowed = got - exact, base - exact
    usual = max(usual, _relative(base, exact))
    for axis, ratio in ((None, large if got.size >= SMALL else SMALL_RATIO), (-1, SMALL_RATIO)):
        # a row that is larger than the others rounds by its own size
        size = np.sqrt(np.mean(exact**2, axis=axis))
        floor = rounding * np.maximum(whole, size)
        far = np.sqrt(np.mean(error**2, axis=axis))
        own = np.sqrt(np.mean(allowed**2, axis=axis))
        limit = ratio * np.maximum(own, usual * size) + floor
        bad = np.atleast_1d(far > limit)
        if bad.any():
            row = first(bad)
            worst, most, eager, other = (
                float(np.atleast_1d(x)[row]) for x in (far, limit, own, usual * size)
            )
            at, actual = At(name=name, index=() if axis is None else row), f"error {number(worst)}"
            expect = Near(bits(most), bits(eager), bits(other) if other > eager else "")
            factor = worst / most
            symptom, role = "error beyond eager's", role_of(name)
            return diverged("O9", arm, role, symptom, at, actual, expect, factor=factor)
    return None
