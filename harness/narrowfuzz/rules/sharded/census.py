"""S7: the layers that a recipe converts run quantised on ranks, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.names import name_of
from narrowfuzz.rules.evidence import Evidence, same_bits
from narrowfuzz.rules.rule import diverged, plain
from narrowfuzz.rules.sharded.evidence import arm_of, run_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Own
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

#: The expectation of a verdict about products that are not quantised on ranks.
QUANTISED = "quantised products, as in one process"


def check_quantised(evidence: Evidence) -> Iterator[Verdict]:
    """S7: if no quantised product is observed on ranks, although one process makes some, and
    conversion changes the products of one process, it must change the results of ranks, too."""
    arm, run = arm_of(evidence), run_of(evidence)
    if run is None:
        return
    alone = evidence.traces[EAGER.name]
    if not evidence.plan.quantised or not _products(alone):
        yield plain("S7", arm, "operand", "not_applicable", "one process shows no product")
    elif BY_NAME[arm].compiled:
        yield plain("S7", arm, "operand", "not_applicable", "nobody sees what graphs multiply")
    elif _products(run):
        yield plain("S7", arm, "operand", "ok")
    elif why := _not_comparable(evidence, run, alone):
        yield plain("S7", arm, "operand", "inconclusive", why)
    else:
        at, actual = At(what="module"), "the results of the unconverted model"
        yield diverged("S7", arm, "operand", "not quantised on ranks", at, actual, Own(QUANTISED))


def _products(run: Trace) -> bool:
    return any(call.sites for trace in run.ranks for call in trace.calls)


def _not_comparable(evidence: Evidence, run: Trace, alone: Trace) -> str:
    """Why results do not show that ranks quantise nothing; "" if they do: on ranks they are those
    of the unconverted model, and in one process its products are not."""
    assert evidence.unconverted_run is not None and evidence.unconverted_alone is not None
    bare = evidence.unconverted_run()
    if bare.error is not None:
        return bare.error.message
    if next(_differing(run, bare), None):
        return "no product is seen on ranks, and their results differ without the conversion"
    bare_alone = evidence.unconverted_alone()
    if bare_alone.error is not None:
        return bare_alone.error.message
    every = [item for trace in run.ranks for item in trace.outputs.items()]
    of_products = _of_products(evidence)
    numbers = {k for name, x in every if (k := name_of(name).kind) in of_products and _numbers(x)}
    whole = numbers - {name_of(name).kind for name, x in every if np.isnan(x).any()}
    for name, x, other in _differing(alone, bare_alone):
        kind = name_of(name).kind
        finite = np.isfinite(x) & np.isfinite(other)
        if kind in whole or (kind in numbers and (finite & ~same_bits(x, other)).any()):
            return ""
    return "in one process, too, products are those of the unconverted model, or NaN on ranks"


def _numbers(x: F32) -> bool:
    return not np.isnan(x).all()


def _differing(one: Trace, other: Trace) -> Iterator[tuple[str, F32, F32]]:
    """The results of every rank that differ between two runs; NaN where one run lacks a result."""
    for a, b in zip(one.ranks, other.ranks, strict=True):
        lacking = {name: np.full_like(x, np.nan) for name, x in (a.outputs | b.outputs).items()}
        mine, theirs = lacking | a.outputs, lacking | b.outputs
        for name, x in mine.items():
            if not same_bits(x, theirs[name]).all():
                yield name, x, theirs[name]


def _of_products(evidence: Evidence) -> set[str]:
    """The kinds of results that are products of converted linears, or made only of such products.
    In a model with other branches that excludes output and input gradient, which may show nothing
    but those branches. The gradient of a bias is no product: it is a sum of output gradients."""
    calls = (call for trace in evidence.traces[EAGER.name].ranks for call in trace.calls)
    made = {f"{call.module}.weight.grad" for call in calls if call.sites}
    return made if MODELS[evidence.spec.model].branches else {"output", "grad_input", *made}
